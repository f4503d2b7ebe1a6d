"""What a rank holds from one request to the next: inputs that requests repeat, and what calls left for later ones.

Which call may use what another left is the parent's to say (pool/worker_group.py), and so is which inputs are the same:
it compares bytes and gives every content a number that it never uses again (pool/arena.py).
"""

from collections.abc import Hashable, Mapping
from typing import Any

import torch

from ..models.hosted.first_block import Residuals
from ..parallel.kept_keys import HeldRows
from ..plan import BatchSlice
from ..wire.requests import CallSlot
from .inputs import to_device


class HeldState:
    """This rank's parts of inputs that requests repeat, on the device, and what calls of one epoch left, by slot.

    `slots`: keys and values of a pipeline as a `HeldRows`, or what a step cache keeps. `told` is what the parent says
    of each call of the request that runs; () where none leaves anything.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies: dict[int, dict[Hashable, torch.Tensor]] = {}  # by the content's number, then by the part
        self._copies_at: dict[int, dict[Hashable, torch.Tensor]] = {}  # the same by the address of a request's input
        self.epoch = 0
        self.told: tuple[CallSlot, ...] = ()
        self.slots: dict[tuple[int, BatchSlice], Any] = {}

    def begin(
        self, told: tuple[CallSlot, ...], tensors: Mapping[str, torch.Tensor], repeated: Mapping[str, int]
    ) -> None:
        """A request begins, whose calls are all of one epoch: what is of another goes, and inputs not `repeated` do.

        `tensors` are its views of shared memory, `repeated` has the numbers of those that requests repeat.
        """
        if told and told[0].epoch != self.epoch:
            self.epoch, self.slots = told[0].epoch, {}
        self.told = told
        self._copies = {number: self._copies.get(number, {}) for number in repeated.values()}
        self._copies_at = {tensors[name].data_ptr(): self._copies[number] for name, number in repeated.items()}

    def input_here(self, whole: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """`part`, rows of the input `whole`, on the device, not to be written to. On the CPU it may be that part.

        An input that is new is not kept: a ControlNet's residuals come new with each step and are large. Only of a view
        is it known by its address which part it is; rows that were gathered are not kept.
        """
        kept = self._copies_at.get(whole.data_ptr()) if part.numel() else None
        if kept is None or part.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr():
            return to_device(part, self._device)
        key = (part.data_ptr() - whole.data_ptr(), part.shape, part.stride(), part.dtype)
        if key not in kept:
            kept[key] = to_device(part, self._device, copy=True)
        return kept[key]

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
        """Free all of it. The parent has calls that used it be of another epoch."""
        self.slots, self._copies, self._copies_at = {}, {}, {}
