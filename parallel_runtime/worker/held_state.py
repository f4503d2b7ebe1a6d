"""What calls leave on a rank for those that follow them: keys and values of a pipeline, a step cache's residuals.

Which call may use them is the parent's to say (pool/worker_group.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..models.hosted.first_block import Residuals
from ..parallel.kept_keys import HeldRows
from ..plan import BatchSlice
from ..wire.requests import CallSlot


@dataclass
class HeldState:
    """What calls of one epoch left, by slot: keys and values as a `HeldRows`, or what a step cache keeps."""

    epoch: int = 0
    slots: dict[tuple[int, BatchSlice], Any] = field(default_factory=dict)

    def _place(self, told: CallSlot, piece: BatchSlice) -> tuple[int, BatchSlice] | None:
        """Where what the call before left of a piece lies; None for a call that no other will follow.

        What is of another epoch is dropped.
        """
        if told.epoch != self.epoch:
            self.epoch = told.epoch
            self.drop()
        return None if told.slot is None else (told.slot, piece)

    def residuals_of(self, told: Sequence[CallSlot], piece: BatchSlice) -> Residuals | None:
        """What a step cache keeps of a piece; None for one of a call that no other will follow."""
        place = self._place(told[piece.call], piece)
        return None if place is None else self.slots.setdefault(place, Residuals())

    def keys_of(self, told: CallSlot, piece: BatchSlice) -> HeldRows:
        """The keys of a piece in a pipeline, of the call before it or new."""
        place = self._place(told, piece)
        if place is None:
            return HeldRows()
        if told.warm:
            return self.slots.setdefault(place, HeldRows())
        if place not in self.slots:
            raise RuntimeError(f"there are no keys in slot {told.slot} of epoch {told.epoch}")
        return self.slots[place]

    def drop(self) -> None:
        """Free all of them. The parent has calls that used them be of another epoch."""
        self.slots = {}
