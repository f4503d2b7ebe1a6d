"""What calls leave on a rank for those that follow them: keys and values of a pipeline, a step cache's residuals.

Which call may use them is the parent's to say (pool/worker_group.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..models.hosted.first_block import Residuals
from ..plan import BatchSlice
from ..wire.requests import CallSlot


@dataclass
class HeldState:
    """What calls of one epoch left, by slot: keys and values as a `HeldRows`, or what a step cache keeps."""

    epoch: int = 0
    slots: dict[tuple[int, BatchSlice], Any] = field(default_factory=dict)

    def enter(self, epoch: int) -> None:
        """Drop what is of another epoch."""
        if epoch != self.epoch:
            self.epoch = epoch
            self.drop()

    def residuals_of(self, told: Sequence[CallSlot], piece: BatchSlice) -> Residuals | None:
        """What a step cache keeps of a piece; None for one of a call that no other will follow."""
        self.enter(told[piece.call].epoch)
        slot = told[piece.call].slot
        return None if slot is None else self.slots.setdefault((slot, piece), Residuals())

    def drop(self) -> None:
        """Free all of them. The parent has calls that used them be of another epoch."""
        self.slots = {}
