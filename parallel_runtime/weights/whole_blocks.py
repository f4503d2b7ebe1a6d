"""How many blocks stay whole on the devices, of weights that ranks hold in parts or that lie in host memory.

A step without such blocks shows what steps of its form take of a device besides what it holds. Further free memory
is for blocks, but for what `left_to_others` says: a block that stays is neither gathered nor copied again. So the first
step of a form is as without, the next ones keep what they gather, and later runs do so from their first one on. All
ranks that gather together keep as many as the one with the least room. What others want the memory for has them all
gone (`drop`).

Owns how many stay and when. What a block that stays is, is block_shards.py's.
"""

import os
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace

import torch

from ..parallel.collectives import Axis, Traffic
from ..planner.memory import left_to_others
from ..process.environment import blocks_may_stay
from .block_shards import BlockShards
from .device_memory import DeviceMemory, device_memory, empty_cache

FORMS = 32  # of steps, of which it is known what they take
TURNS = 8  # steps, of which each leaves room for the largest: prompt and negative may be asked by themselves


class WholeBlocks:
    """The blocks of `shards` that stay whole; `group`: the ranks that gather together."""

    def __init__(
        self,
        shards: BlockShards,
        group: Axis,
        device: torch.device,
        *,
        environment: Mapping[str, str] = os.environ,
        memory: Callable[[torch.device], DeviceMemory | None] = device_memory,
    ) -> None:
        self._shards, self._device, self._memory = shards, device, memory
        self._group = replace(group, traffic=Traffic(show_waiting=group.traffic.show_waiting))  # not counted
        self._may = memory(device) is not None and blocks_may_stay(environment)
        self._all_may: bool | None = None  # those that gather together; None: not asked yet
        self._taken: OrderedDict[Hashable, int] = OrderedDict()  # bytes that a step takes, by its form
        self._forms: deque[Hashable] = deque(maxlen=TURNS)  # of the last steps, which may take turns
        self._measured: tuple[Hashable, int] | None = None  # the step under way that shows it, and what was held then
        self._gave_way = False
        self._most: int | None = None  # where the device had no memory for more

    def begin(self, form: Hashable, *, wanted: bool = True) -> None:
        """A step of this form begins, on every rank of the group; `wanted`, alike on all: blocks may stay whole."""
        if self._all_may is None:
            self._all_may = all(count for count, _ in self._said_by_all(int(self._may)))
        memory, self._measured = self._memory(self._device), None
        if memory is None or not self._all_may:
            return
        if not wanted:
            self._shards.keep(0)
            return
        self._shards.take_freed()  # of a run that was cancelled
        known, gave_way, self._gave_way = form in self._taken, self._gave_way, False
        self._forms.append(form)
        most = 0
        if known and not gave_way:
            self._taken.move_to_end(form)
            held = memory.allocated - self._shards.staying_bytes
            taken = max(self._taken.get(each, 0) for each in self._forms)
            spare = memory.free + memory.reserved - held - taken - left_to_others(memory.total)
            most = self._shards.most_staying(spare)
            most = most if self._most is None else min(most, self._most)
        said = self._said_by_all(most)
        alike = len({staying for _, staying in said}) == 1  # unless some were asked for their memory
        self._shards.keep(self._with_rooms(min(count for count, _ in said)) if alike else 0)
        if not known and not self._shards.staying_bytes:
            empty_cache(self._device)
            now = self._memory(self._device) or memory
            self._measured = form, now.allocated

    def end(self) -> None:
        """The step has ended, on the host."""
        memory = None if self._measured is None else self._memory(self._device)
        if self._shards.take_freed():
            empty_cache(self._device)
        if self._measured is None or memory is None:
            return
        (form, held), self._measured = self._measured, None
        self._taken[form] = memory.reserved - held
        if len(self._taken) > FORMS:
            self._taken.popitem(last=False)

    def drop(self, *, for_a_step: bool = False) -> None:
        """Have none stay, as others want the memory. Ranks that were not asked do so when the next step begins.

        `for_a_step`: of another model. It may be that they take turns, so the next step here keeps none.
        """
        self._gave_way = for_a_step
        self._measured = self._most = None
        self._shards.keep(0)

    def _with_rooms(self, count: int) -> int:
        """For how many of so many blocks every rank has room; all ranks have the same ones already."""
        if not self._shards.lack_rooms(count):
            return count
        empty_cache(self._device)  # so that none of what a step computes in is cut up
        made = self._shards.make_rooms(count)
        if made < count:
            self._most = made
        return min(each for each, _ in self._said_by_all(made))

    def _said_by_all(self, most: int) -> list[tuple[int, int]]:
        """How many blocks each rank has room for, and which stay there now."""
        mine, size = (most, self._shards.staying), self._group.size
        if size == 1:
            return [mine]
        sent = torch.tensor(mine, dtype=torch.int64, device=self._device)
        received = torch.empty(size, len(mine), dtype=torch.int64, device=self._device)
        bytes_of_all = received.view(torch.uint8).flatten()
        self._group.all_gather(sent.view(torch.uint8), bytes_of_all)
        return [(int(count), int(staying)) for count, staying in received.tolist()]
