"""What rows at timestep zero are, in one process: the unmodified diffusers model, run at both timesteps side by side.

A batch of B images becomes one of 2 B: at the call's timestep, and at zero. Before each attention and after each block,
every row is taken from the half that it belongs to and given to both, so that each half goes on from the same tokens.
Shares no code with the engine. The text is at the call's timestep, as it is in ComfyUI.
"""

from collections.abc import Mapping, Sequence

import torch

from parallel_runtime.models.flux.reference import ReferenceModel


class _Rows:
    """Which half each image row is of: `zero` (S_img,) bool."""

    zero = torch.empty(0, dtype=torch.bool)

    def of_both(self, x: torch.Tensor) -> torch.Tensor:
        """x (2 B, S, C), whose last rows are the image's: each row of its own half, in both halves."""
        usual, at_zero = x.chunk(2)
        zero = torch.cat((torch.zeros(x.shape[1] - len(self.zero), dtype=torch.bool), self.zero))
        return torch.where(zero[:, None], at_zero, usual).repeat(2, 1, 1)

    def of_text(self, x: torch.Tensor) -> torch.Tensor:
        """x (2 B, S, C) of the text: that of the call's timestep, in both halves."""
        return x.chunk(2)[0].repeat(2, 1, 1)


class _AttentionOfBoth:
    """An attention processor of diffusers around another one."""

    def __init__(self, inner: object, rows: _Rows) -> None:
        self.inner, self.rows = inner, rows

    def __call__(
        self,
        attn: torch.nn.Module,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """As the inner one; text tokens come first where there is one sequence."""
        text = None if encoder_hidden_states is None else self.rows.of_text(encoder_hidden_states)
        return self.inner(attn, self.rows.of_both(hidden_states), text, attention_mask, image_rotary_emb)


class ZeroTimestepModel:
    """The reference model of a file, in fp32, which reads the input `zero_timestep_rows` too."""

    def __init__(self, path: str) -> None:
        self._reference_model, self._rows = ReferenceModel(path, dtype=torch.float32), _Rows()
        model = self._reference_model.model
        model.set_attn_processor(
            {name: _AttentionOfBoth(inner, self._rows) for name, inner in model.attn_processors.items()}
        )
        for block in (*model.transformer_blocks, *model.single_transformer_blocks):
            block.register_forward_hook(
                lambda _module, _inputs, out: (self._rows.of_text(out[0]), self._rows.of_both(out[1]))
            )

    @torch.inference_mode()
    def __call__(
        self,
        inputs: Mapping[str, torch.Tensor],
        double: Sequence[torch.Tensor] | None = None,
        single: Sequence[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """The velocity (B, S_img, out channels), with ControlNet residuals (B, S_img, C) for each block."""
        self._rows.zero = inputs["zero_timestep_rows"].bool()
        twice = {name: torch.cat((inputs[name],) * 2) for name in ("img", "txt", "y", "guidance") if name in inputs}
        times = torch.cat((inputs["timesteps"], torch.zeros_like(inputs["timesteps"])))
        residuals = ([torch.cat((each,) * 2) for each in kind] if kind else None for kind in (double, single))
        out = self._reference_model.with_residuals({**inputs, **twice, "timesteps": times}, *residuals)
        return self._rows.of_both(out).chunk(2)[0]
