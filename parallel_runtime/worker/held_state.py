"""What a rank holds from one request to the next: inputs that requests repeat, and what calls left for later ones.

Which inputs are the same is the parent's to say: it compares bytes and gives every content a number that it never uses
again (pool/arena.py). So is when another model or plan ran in between, which not every rank has to know of: an epoch of
calls then ends (pool/worker_group.py).
"""

from collections import Counter
from collections.abc import Hashable, Mapping
from typing import Any

import torch

from ..models.hosted.calls import from_tree
from ..models.hosted.first_block import Residuals
from ..parallel.kept_keys import HeldRows
from ..plan import BatchSlice
from ..wire.requests import Step
from .inputs import call_tensors, to_device


class HeldState:
    """This rank's parts of inputs that requests repeat, on the device, and what calls left for those like them.

    Calls are alike that have one place, inputs of the same shapes and their rows in the same batch groups: they have a
    slot. `slots` has keys and values of a pipeline as a `HeldRows`, or what a step cache keeps, of each piece.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies: dict[int, dict[Hashable, torch.Tensor]] = {}  # by the content's number, then by the part
        self._copies_at: dict[int, dict[Hashable, torch.Tensor]] = {}  # the same by the address of a request's input
        self.slots: dict[tuple[int, BatchSlice], Any] = {}
        self._epoch, self._runs = 0, frozenset[str]()  # of the calls that left what is in them
        self._numbers: dict[Hashable, int] = {}  # of slots
        self._calls: Counter[int] = Counter()  # of each slot, the present one included
        self._warmup_steps = 0
        self._present: list[int | None] = []  # the slots of the request's calls
        self._steps: list[int | None] = []  # of the run, that they are of; None: not told

    def begin(self, step: Step, tensors: Mapping[str, torch.Tensor]) -> None:
        """A request begins; `tensors` are its views of shared memory. Inputs that it does not repeat go.

        So does what calls left, in a new epoch and once there are calls of a run that left nothing yet.
        """
        runs = frozenset(place.run for place in step.places if place is not None)
        if runs and (step.epoch != self._epoch or not runs <= self._runs):
            self._epoch, self._runs = step.epoch, runs
            self.slots, self._numbers, self._calls = {}, {}, Counter()
        self._present, self._warmup_steps = [], step.plan.warmup_steps
        staged = step.plan.pipefusion > 1
        self._steps = [
            _step_of(call, call_tensors(tensors, number)) for number, call in enumerate(step.calls) if staged
        ]
        for number, place in enumerate(step.places):
            slot = None
            if place is not None:
                shapes = tuple((name, each.shape) for name, each in tensors.items() if name.startswith(f"{number}."))
                rows = tuple(tuple(each for each in pieces if each.call == number) for pieces in step.batch_groups)
                slot = self._numbers.setdefault((place, shapes, rows), len(self._numbers))
                self._calls[slot] += 1
            self._present.append(slot)
        self._copies = {number: self._copies.get(number, {}) for number in step.repeated.values()}
        self._copies_at = {tensors[name].data_ptr(): self._copies[number] for name, number in step.repeated.items()}

    def input_here(self, whole: torch.Tensor, part: torch.Tensor, *, copy: bool = False) -> torch.Tensor:
        """`part`, rows of the input `whole`, on the device. It must not be written to: it may be kept, or that part
        itself. With `copy` it is a tensor of its own, copied once from the host unless it is kept.

        An input that is new is not kept: a ControlNet's residuals come new with each step and are large. Only of a view
        is it known by its address which part it is; rows that were gathered are not kept.
        """
        kept = self._copies_at.get(whole.data_ptr()) if part.numel() else None
        if kept is None or part.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr():
            return to_device(part, self._device, copy=copy)
        key = (part.data_ptr() - whole.data_ptr(), part.shape, part.stride(), part.dtype)
        if key not in kept:
            kept[key] = to_device(part, self._device, copy=True)
        return kept[key].clone() if copy else kept[key]

    @property
    def run(self) -> Hashable:
        """A name of the run of the request's calls, where others will follow each of them; else None."""
        return (self._epoch, self._runs) if self._present and None not in self._present else None

    def residuals_of(self, piece: BatchSlice) -> Residuals | None:
        """What a step cache keeps of a piece; None for one of a call that no other will follow."""
        slot = self._slot_of(piece)
        return None if slot is None else self.slots.setdefault((slot, piece), Residuals())

    def warms_up(self, piece: BatchSlice) -> bool:
        """Whether a piece goes through a pipeline whole: of the first steps, and of a slot's first calls, as many as
        steps; and one of a call that has no slot."""
        slot, step = self._slot_of(piece), self._steps[piece.call] if self._steps else None
        first = step is not None and step < self._warmup_steps
        return slot is None or first or self._calls[slot] <= self._warmup_steps

    def keys_of(self, piece: BatchSlice) -> HeldRows:
        """The keys of a piece in a pipeline, of the call before it or new."""
        slot = self._slot_of(piece)
        if slot is None:
            return HeldRows()
        if self.warms_up(piece):
            return self.slots.setdefault((slot, piece), HeldRows())
        if (slot, piece) not in self.slots:
            raise RuntimeError(f"there are no keys in slot {slot} of epoch {self._epoch}")
        return self.slots[slot, piece]

    def _slot_of(self, piece: BatchSlice) -> int | None:
        return self._present[piece.call] if self._present else None

    def drop(self) -> None:
        """Free all of it."""
        self.slots, self._runs, self._copies, self._copies_at = {}, frozenset(), {}, {}


def _step_of(options: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> int | None:
    """Which step of its run a call is of, by its sigma among the run's; None where it is not told them.

    A sampler may make several calls a step; one at the run's last sigma is of the last step.
    """
    given: Any = from_tree(options["call"], [tensors[f"t{number}"] for number in range(options["tensors"])])
    told = given["kwargs"].get("transformer_options", {})
    sigmas, of_run = told.get("sigmas"), told.get("sample_sigmas")
    if not isinstance(sigmas, torch.Tensor) or not isinstance(of_run, torch.Tensor) or not sigmas.numel():
        return None
    return min(int((of_run[1:] >= sigmas.flatten()[0]).sum()), of_run.numel() - 2)
