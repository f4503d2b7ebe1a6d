"""A forward pass on one rank, in this process, equals the reference model, with all that a step may bring."""

from __future__ import annotations

import pytest
import torch

from parallel_runtime.checkpoint import ModelSpec, read_header
from parallel_runtime.cli.workload import Workload, relative_error
from parallel_runtime.models.flux.adapter import Block, Modulation, Tokens, Weights
from parallel_runtime.models.flux.compiled import AFTER, double_after, single_after
from parallel_runtime.models.flux.config import FluxConfig
from parallel_runtime.models.flux.reference import ReferenceModel
from runtime.one_rank import OneRank
from runtime.zero_timestep_model import ZeroTimestepModel

# fp32 sums in another order: at most 1e-6 was seen
TOLERANCE = 1e-5
# what an input that is left out, or goes elsewhere, must change at least
DIFFERENT = 0.02
ODD = Workload(width=232, height=136, text_tokens=5, batch=2)
LARGEST = 65504.0  # of fp16


@pytest.fixture(scope="module")
def config(deep: ModelSpec) -> FluxConfig:
    """Its sizes: two double and two single blocks."""
    return FluxConfig.from_header(read_header(deep.path))


@pytest.fixture(scope="module")
def model(deep: ModelSpec) -> OneRank:
    """The engine."""
    return OneRank(deep)


@pytest.fixture(scope="module")
def reference(deep: ModelSpec) -> ReferenceModel:
    """The unmodified diffusers model of the same file."""
    return ReferenceModel(deep.path, dtype=torch.float32)


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_a_pass_equals_the_reference_model(model: OneRank, reference: ReferenceModel, config: FluxConfig) -> None:
    tensors = ODD.tensors(config)
    tensors["guidance"] = torch.tensor([3.5, 30.0])
    assert relative_error(model(tensors), reference(tensors)) <= TOLERANCE
    for name in ("guidance", "timesteps", "y"):
        other = reference({**tensors, name: tensors[name].flip(0)})
        assert relative_error(model(tensors), other) > DIFFERENT, f"{name} of another image changes nothing"


def test_each_block_takes_its_own_residual(model: OneRank, reference: ReferenceModel, config: FluxConfig) -> None:
    tensors = ODD.tensors(config)
    shape = (ODD.batch, ODD.image_tokens, config.hidden_size)
    double, single = ([noise(*shape, seed=seed) for seed in seeds] for seeds in ((1, 2), (3, 4)))
    named = {f"control_in.{n}": each for n, each in enumerate(double)}
    named |= {f"control_out.{n}": each for n, each in enumerate(single)}
    expected = reference.with_residuals(tensors, double, single)
    assert relative_error(model({**tensors, **named}, control_in=[0, 1], control_out=[0, 1]), expected) <= TOLERANCE
    for wrong in ((double[::-1], single), (double, single[::-1]), ([0 * double[0], double[0]], single)):
        assert relative_error(reference.with_residuals(tensors, *wrong), expected) > DIFFERENT


def test_blocks_beyond_a_list_of_residuals_get_none(
    model: OneRank, reference: ReferenceModel, config: FluxConfig
) -> None:
    tensors = ODD.tensors(config)
    shape = (ODD.batch, ODD.image_tokens, config.hidden_size)
    one = {"control_in.0": noise(*shape, seed=1), "control_out.0": noise(*shape, seed=2)}
    first, nothing = ([one[f"control_{kind}.0"]] for kind in ("in", "out")), torch.zeros(shape)
    expected = reference.with_residuals(tensors, *([*each, nothing] for each in first))
    assert relative_error(model({**tensors, **one}, control_in=[0], control_out=[0]), expected) <= TOLERANCE
    again = reference.with_residuals(tensors, *([one[f"control_{kind}.0"]] * 2 for kind in ("in", "out")))
    assert relative_error(again, expected) > DIFFERENT


def test_a_residual_of_the_first_rows_leaves_the_others_alone(
    model: OneRank, reference: ReferenceModel, config: FluxConfig
) -> None:
    tensors = ODD.tensors(config)
    rows = noise(ODD.batch, 60, config.hidden_size, seed=1)
    nothing = torch.zeros(ODD.batch, ODD.image_tokens, config.hidden_size)
    whole = nothing.clone()
    whole[:, :60] = rows
    expected = reference.with_residuals(tensors, [whole, nothing], None)
    assert relative_error(model({**tensors, "control_in.0": rows}, control_in=[0]), expected) <= TOLERANCE


def test_an_attention_mask_is_followed(model: OneRank, reference: ReferenceModel, config: FluxConfig) -> None:
    tensors = ODD.tensors(config)
    tokens = ODD.text_tokens + ODD.image_tokens
    added = noise(ODD.batch, tokens, tokens, seed=3)
    seen = noise(1, tokens, tokens, seed=4) > 0
    for mask in (added, seen, torch.zeros(1, tokens, tokens).masked_fill(~seen, -torch.inf)):
        expected = reference({**tensors, "mask": mask})
        assert relative_error(model({**tensors, "mask": mask}), expected) <= TOLERANCE
        assert relative_error(reference(tensors), expected) > DIFFERENT


def test_rows_at_timestep_zero_equal_the_reference_model(
    deep: ModelSpec, model: OneRank, reference: ReferenceModel, config: FluxConfig
) -> None:
    tensors, exact = ODD.tensors(config), ZeroTimestepModel(deep.path)
    zero_timestep = torch.zeros(ODD.image_tokens, dtype=torch.uint8)
    assert relative_error(exact({**tensors, "zero_timestep_rows": zero_timestep}), reference(tensors)) <= TOLERANCE
    zero_timestep[60:] = 1
    expected = exact({**tensors, "zero_timestep_rows": zero_timestep})
    assert relative_error(model({**tensors, "zero_timestep_rows": zero_timestep}), expected) <= TOLERANCE
    assert relative_error(reference(tensors), expected) > DIFFERENT
    one_row_less = zero_timestep.clone()
    one_row_less[60] = 0
    assert relative_error(exact({**tensors, "zero_timestep_rows": one_row_less}), expected) > 10 * TOLERANCE


def test_the_timestep_stays_fp32_until_its_sinusoids(deep: ModelSpec, config: FluxConfig) -> None:
    """bf16 holds 1000 t of few timesteps t: those of 0.7003 and of what bf16 makes of it are 1.3 apart."""
    tensors = Workload(width=64, height=64, text_tokens=4).tensors(config)
    tensors |= {"timesteps": torch.tensor([0.7003]), "guidance": torch.tensor([4.0])}
    half = OneRank(ModelSpec.of(deep.path, "bfloat16"))
    whole = OneRank(deep)

    def vectors(rank: OneRank, **changes: torch.Tensor) -> torch.Tensor:
        with rank.weights.block("") as w:
            return rank.adapter.condition(w, {**tensors, **changes}).vec

    expected = vectors(whole)
    assert relative_error(vectors(half), expected) < 0.01
    rounded = vectors(whole, timesteps=tensors["timesteps"].bfloat16().float())
    assert relative_error(rounded, expected) > 0.03, "rounding the timestep changes nothing here"


@pytest.mark.parametrize("kind", ["double", "single"])
@pytest.mark.parametrize("compiled", [False, True])
def test_what_overflows_in_fp16_stays_the_largest_number(
    deep: ModelSpec, model: OneRank, kind: str, compiled: bool
) -> None:
    """A block that adds to tokens near fp16's end, in fp16 and, for the measure, in fp32."""
    block = next(block for block in model.adapter.blocks if block.kind == kind)
    results = []
    for rank in (OneRank(ModelSpec.of(deep.path, "float16")), model):
        dtype, hidden = rank.weights.dtype, rank.adapter.config.hidden_size
        x = (65000 * noise(1, 9, hidden, seed=1).sign()).to(dtype)
        vec = noise(1, 1, hidden, seed=2).to(dtype)
        attn = noise(1, 9, hidden, seed=3).to(dtype)
        with torch.inference_mode(), rank.weights.block(block.prefix) as w:
            rows = rank.adapter.modulation_rows(block, w, vec)
            for each in rows:
                each[..., -hidden:] *= 2000  # the last gate alone: from what overflows earlier NaN would come
            tokens = Tokens(x, 3, vec, torch.ones(1, 9, 1, 1, dtype=torch.complex64))
            mlp = noise(1, 9, rank.adapter.config.mlp_hidden, seed=4).to(dtype)
            if compiled:
                results.append(_after_compiled(block, w, tokens, rows, attn, mlp))
            else:
                joined = rank.adapter._activated(mlp) if kind == "single" else None
                mod = rank.adapter.modulation(block, rows, tokens)
                rank.adapter.finish(block, w, tokens, attn, mod, mlp=joined, residual=None)
                results.append(tokens.x)
    ours, exact = results
    assert (exact.abs() > LARGEST).any(), "nothing overflows"
    assert ours.isfinite().all()
    assert ours.abs().max() == LARGEST
    assert relative_error(ours.float(), exact.clamp(-LARGEST, LARGEST)) < 0.01


def _after_compiled(
    block: Block, w: Weights, tokens: Tokens, rows: Modulation, attn: torch.Tensor, mlp: torch.Tensor
) -> torch.Tensor:
    """The tokens after a block by the half of it that a compiler is given."""
    weights = w.plain(AFTER[block.kind])
    if block.kind == "single":
        single_after(tokens.x, None, rows, attn, mlp, weights)
    else:
        double_after(tokens.x, torch.empty(tokens.num_text), None, rows, attn, weights)
    return tokens.x
