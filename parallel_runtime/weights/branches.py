"""LoRAs that run beside a weight, not in it.

Letters: `O` rows and `I` columns of a weight, `r` rank of a LoRA.

A side branch costs two thin products a step and makes a change of strength free: only a number changes. Source: LoRA
(arXiv 2106.09685), equation 3.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..weight_patch import WeightPatch


@dataclass
class Branch:
    """One LoRA of one weight: up (O', r) and down (r, I) on rows from `first_row` on, times both factors."""

    up: torch.Tensor
    down: torch.Tensor
    first_row: int
    alpha_over_rank: float
    strength: float

    @classmethod
    def of(cls, patch: WeightPatch, *, dtype: torch.dtype, device: torch.device) -> "Branch":
        """The branch of a patch that `fits_beside`, with tensors of its own."""
        up, down, alpha, _ = patch.values
        if not isinstance(up, torch.Tensor) or not isinstance(down, torch.Tensor) or isinstance(alpha, torch.Tensor):
            raise ValueError(f"{patch.key}: a LoRA without its two matrices; use a complete file")
        factor = 1.0 if alpha is None else alpha / down.shape[0]
        up, down = (tensor.flatten(1).to(device=device, dtype=dtype, copy=True) for tensor in (up, down))
        return cls(up, down, 0 if patch.offset is None else patch.offset[1], factor, patch.strength)

    def check_fit(self, shape: tuple[int, ...]) -> None:
        """Raise `ValueError` when the branch is not one of a weight of this shape."""
        rows, columns = self.first_row + self.up.shape[0], self.down.shape[1]
        if len(shape) != 2 or rows > shape[0] or columns != shape[1] or self.up.shape[1] != self.down.shape[0]:
            raise ValueError(
                f"a lora patch of shapes {[list(self.up.shape), list(self.down.shape)]} does not fit a weight of "
                f"{list(shape)}; use one made for this model"
            )

    def add_to(self, out: torch.Tensor, x: torch.Tensor, *, start: int, columns: slice) -> None:
        """Add the branch's part of the product to `out` (..., rows), in place: rows from `start` on.

        x (..., I), or (..., columns) of it.
        """
        first = max(start, self.first_row)
        num = min(start + out.shape[-1], self.first_row + self.up.shape[0]) - first
        if num > 0:
            up = self.up.narrow(0, first - self.first_row, num)
            rows = out.narrow(-1, first - start, num)
            rows.add_(F.linear(F.linear(x, self.down[:, columns]), up), alpha=self.strength * self.alpha_over_rank)


def fits_beside(patch: WeightPatch) -> bool:
    """Whether a patch can run as a side branch: a plain LoRA of whole rows of a matrix."""
    plain = patch.kind == "lora" and patch.values[3] is None and not patch.swap and patch.strength_model == 1.0
    return plain and patch.key.endswith(".weight") and (patch.offset is None or patch.offset[0] == 0)
