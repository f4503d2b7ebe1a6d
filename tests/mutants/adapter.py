"""Mistakes in Flux.1's arithmetic, in what its blocks are given, and in what a step is refused for."""

from __future__ import annotations

from .mutant import Mutant

WHOLE = "test_forward.py::test_a_pass_equals_the_reference_model"
RESIDUALS = "test_forward.py::test_each_block_takes_its_own_residual"
ZERO_ROWS = "test_forward.py::test_rows_at_timestep_zero_equal_the_reference_model"
REFUSED = "test_flux_inputs.py::test_a_step_that_cannot_be_names_the_value_the_limit_and_the_remedy"
OVERFLOW = "test_forward.py::test_what_overflows_in_fp16_stays_the_largest_number"

MUTANTS = (
    Mutant(
        "the timestep is rounded in the adapter",
        'times = inputs["timesteps"][..., None]',
        'times = inputs["timesteps"].to(dtype)[..., None]',
        ("test_forward.py::test_the_timestep_stays_fp32_until_its_sinusoids",),
    ),
    Mutant(
        "sine stands before cosine",
        "torch.cat((torch.cos(angles), torch.sin(angles)), -1)",
        "torch.cat((torch.sin(angles), torch.cos(angles)), -1)",
        (WHOLE,),
    ),
    Mutant("positions turn faster", "THETA = 10_000", "THETA = 1_000", (WHOLE,)),
    Mutant(
        "the guidance of the first image serves all",
        'timestep_embedding(inputs["guidance"][:, None])',
        'timestep_embedding(inputs["guidance"][:1, None])',
        (WHOLE,),
    ),
    Mutant(
        "modulations lack the 1 of their scale",
        "self.config.hidden_size))[..., 1, :].add_(1)",
        "self.config.hidden_size))[..., 1, :].add_(0)",
        (WHOLE,),
    ),
    Mutant("the head's scale lacks its 1", "shift, 1 + scale))", "shift, scale))", (WHOLE,)),
    Mutant(
        "text is modulated as the image is",
        'w.linear("txt_attn.qkv", modulated(x[:, :num_text], mod[6], mod[7]))',
        'w.linear("txt_attn.qkv", modulated(x[:, :num_text], mod[0], mod[1]))',
        (WHOLE,),
    ),
    Mutant(
        "queries and keys of the image take the text's norms",
        '(_norm_weights(w, "img_attn.norm"), slice(num_text, None)),',
        '(_norm_weights(w, "txt_attn.norm"), slice(num_text, None)),',
        (WHOLE,),
    ),
    Mutant(
        "a single block's MLP is exact GELU",
        'torch.ops.aten.gelu.out(x, approximate="tanh"',
        'torch.ops.aten.gelu.out(x, approximate="none"',
        (WHOLE,),
    ),
    Mutant(
        "what overflows in fp16 is left as it is",
        "    x.addcmul_(mod[2], product)\n    bound(x)\n",
        "    x.addcmul_(mod[2], product)\n",
        (OVERFLOW,),
    ),
    Mutant(
        "a ControlNet's residual goes to the block after",
        "number = numbers[index] if index < len(numbers) else None",
        "number = numbers[index - 1] if 0 < index <= len(numbers) else None",
        (RESIDUALS,),
    ),
    Mutant(
        "single blocks take the double blocks' residuals",
        """return inputs[f"{'control_in' if kind == 'double' else 'control_out'}.{number}"]""",
        """return inputs[f"{'control_in'}.{number}"]""",
        (RESIDUALS,),
    ),
    Mutant(
        "a list of residuals shorter than the depth begins again",
        "number = numbers[index] if index < len(numbers) else None",
        "number = numbers[index % len(numbers)] if numbers else None",
        ("test_forward.py::test_blocks_beyond_a_list_of_residuals_get_none",),
    ),
    Mutant(
        "a residual is added from the first text token on",
        "            start = tokens.num_text\n            tokens.x[:, start",
        "            start = 0\n            tokens.x[:, start",
        (RESIDUALS,),
    ),
    Mutant(
        "rows at timestep zero are those of the usual timestep",
        "times = torch.cat((times, torch.zeros_like(times)), -1)",
        "times = torch.cat((times, times), -1)",
        (ZERO_ROWS,),
    ),
    Mutant(
        "the head modulates all rows alike",
        'shift, scale = by_row(w.linear("final_layer.adaLN_modulation.1", tokens.vec), zero_timestep).chunk(2, -1)',
        'shift, scale = w.linear("final_layer.adaLN_modulation.1", tokens.vec)[:, :1].chunk(2, -1)',
        (ZERO_ROWS,),
    ),
    Mutant(
        "a ControlNet for a wider model is let in",
        " or shape[2] != config.hidden_size:",
        ":",
        (f"{REFUSED}[residual width]",),
    ),
    Mutant(
        "numbers that are not finite are let in",
        "    if broken:\n",
        "    if broken < 0:\n",
        (f"{REFUSED}[NaN in the latent]",),
    ),
)
