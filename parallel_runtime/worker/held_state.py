"""What calls leave on a rank for those that follow them: keys and values of a pipeline, a step cache's residuals.

Which call may use them is the parent's to say (pool/worker_group.py).
"""

from dataclasses import dataclass, field
from typing import Any

from ..models.hosted.first_block import Residuals
from ..parallel.kept_keys import HeldRows
from ..plan import BatchSlice
from ..wire.requests import CallSlot


@dataclass
class HeldState:
    """What calls of one epoch left, by slot: keys and values as a `HeldRows`, or what a step cache keeps.

    `told` is what the parent says of each call of the request that runs; () where none leaves anything.
    """

    epoch: int = 0
    told: tuple[CallSlot, ...] = ()
    slots: dict[tuple[int, BatchSlice], Any] = field(default_factory=dict)

    def begin(self, told: tuple[CallSlot, ...]) -> None:
        """A request begins, whose calls are all of one epoch: what is of another is dropped."""
        if told and told[0].epoch != self.epoch:
            self.epoch = told[0].epoch
            self.drop()
        self.told = told

    @property
    def run(self) -> int | None:
        """The epoch of the request's calls, where others will follow each of them; else None."""
        return self.epoch if self.told and all(each.slot is not None for each in self.told) else None

    def residuals_of(self, piece: BatchSlice) -> Residuals | None:
        """What a step cache keeps of a piece; None for one of a call that no other will follow."""
        slot = self.told[piece.call].slot if self.told else None
        return None if slot is None else self.slots.setdefault((slot, piece), Residuals())

    def keys_of(self, piece: BatchSlice) -> HeldRows:
        """The keys of a piece in a pipeline, of the call before it or new."""
        told = self.told[piece.call]
        if told.slot is None:
            return HeldRows()
        place = (told.slot, piece)
        if told.warm:
            return self.slots.setdefault(place, HeldRows())
        if place not in self.slots:
            raise RuntimeError(f"there are no keys in slot {told.slot} of epoch {told.epoch}")
        return self.slots[place]

    def drop(self) -> None:
        """Free all of them. The parent has calls that used them be of another epoch."""
        self.slots = {}
