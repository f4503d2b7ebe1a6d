"""One model's changes of weights, message by message: what is merged, what runs beside, what is taken back.

Owns the bookkeeping of a change that comes in several messages. How a weight is merged is `patches.py`'s, where it lies
`model_weights.py`'s and `sharded.py`'s.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from ..errors import RequestCancelledError
from ..weight_patch import WeightPatch, unpack
from ..wire.requests import ChangeWeights
from .branches import Branch, fits_beside
from .model_weights import ModelWeights


class WeightChanges:
    """The change under way, or the last one, of one model's weights."""

    def __init__(self, weights: ModelWeights) -> None:
        self._weights = weights
        self._merged: set[str] = set()
        self._branches: dict[str, list[Branch]] = {}
        self._in_order: list[Branch] = []  # as their patches came

    def take(
        self,
        change: ChangeWeights,
        tensors: Mapping[str, torch.Tensor],
        *,
        cancelled: Callable[[], bool],
        beat: Callable[[], None],
    ) -> None:
        """Take one message of a change. The last one takes back whatever the change has not named."""
        if change.first:
            self._merged, self._branches, self._in_order = set(), {}, []
        for name, patches in unpack(change.records, tensors).items():
            if cancelled():
                raise RequestCancelledError("changing weights was cancelled")
            if change.side_branch and all(fits_beside(patch) for patch in patches):
                self._put_beside(name, patches)
            else:
                self._weights.patch(name, patches)
                self._merged.add(name)
            beat()
        if change.last:
            self._weights.set_lora_branches(self._branches)
            self._weights.unpatch_except(self._merged, beat)

    def _put_beside(self, name: str, patches: Sequence[WeightPatch]) -> None:
        branches = [Branch.of(patch, dtype=self._weights.dtype, device=self._weights.device) for patch in patches]
        self._branches[name] = branches
        self._in_order.extend(branches)

    def set_strengths(self, strengths: Sequence[float]) -> bool:
        """Change the strengths alone; false when that is not enough, since some patches are merged."""
        if self._merged or len(strengths) != len(self._in_order):
            return False
        for branch, strength in zip(self._in_order, strengths, strict=True):
            branch.strength = strength
        return True
