"""The weights of one block as the functions of a model use them, and LoRAs that run beside a weight, not in it.

Letters: `O` rows and `I` columns of a weight, `r` rank of a LoRA.

A side branch costs two thin products a step and makes a change of strength free: only a number changes. Source: LoRA
(arXiv 2106.09685), equation 3.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from ..weight_patch import WeightPatch

ALL = slice(None)


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


@dataclass(frozen=True)
class BlockWeights:
    """Weights by their names within the block, in the compute dtype, and the branches beside them."""

    tensors: Mapping[str, torch.Tensor]
    branches: Mapping[str, list[Branch]] = field(default_factory=dict)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def plain(self, names: tuple[str, ...]) -> tuple[torch.Tensor, ...] | None:
        """These weights, in this order; None when a branch runs beside one of them."""
        if self.branches and any(self.branches.get(name) for name in names):
            return None
        return tuple([self.tensors[name] for name in names])

    def linear(self, name: str, x: torch.Tensor, *, rows: slice = ALL, columns: slice = ALL) -> torch.Tensor:
        """x (..., columns) through the linear layer `name` and its branches, or these rows of it, to (..., rows)."""
        weight, bias = self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"]
        if rows is not ALL:
            weight, bias = weight[rows], bias[rows]
        out = F.linear(x, weight if columns is ALL else weight[:, columns], bias)
        self._add_branches(out, name, x, start=rows.start or 0, columns=columns)
        return out

    def add_linear(self, out: torch.Tensor, name: str, x: torch.Tensor, *, columns: slice) -> None:
        """Add to out (..., O), contiguous, what `linear` of other columns left out: x (..., columns) through these."""
        weight = self.tensors[f"{name}.weight"][:, columns]
        out.view(-1, out.shape[-1]).addmm_(x.reshape(-1, x.shape[-1]), weight.t())
        self._add_branches(out, name, x, start=0, columns=columns)

    def _add_branches(self, out: torch.Tensor, name: str, x: torch.Tensor, *, start: int, columns: slice) -> None:
        for branch in self.branches.get(f"{name}.weight", ()):
            branch.add_to(out, x, start=start, columns=columns)
