"""How many blocks stay whole on the devices, of weights that ranks hold in parts or that lie in host memory.

A step without such blocks shows what steps of its form take of a device. Beyond that, what is free is for blocks, but
for `WHOLE_LEAVE` of the device: a block that stays is neither gathered nor copied again. So the first step of a form is
as without, the second keeps what it gathers, and later runs keep it in their first. All ranks that gather together keep
as many as the one with the least room. What others want the memory for has them all gone (`drop`).

Owns how many stay and when. What a block that stays is, is block_shards.py's.
"""

import os
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from ..parallel.collectives import Axis, Traffic
from ..plan import WHOLE_LEAVE
from ..rank_environment import WHOLE_BLOCKS
from .block_shards import BlockShards

OFF = "0"
FORMS = 32  # of steps, of which it is known what they take
TURNS = 8


class DeviceMemory(NamedTuple):
    """Bytes of a device: free for any process, taken by torch in this one, and all."""

    free: int
    reserved: int
    total: int


def memory_of_device(device: torch.device) -> DeviceMemory | None:
    """What is free on a GPU; None for the CPU, whose memory is every rank's and ComfyUI's."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(free, torch.cuda.memory_reserved(device), total)


def give_back_cached(device: torch.device) -> None:
    """Have torch take no more of a GPU than its tensors do."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


class WholeBlocks:
    """The blocks of `shards` that stay whole; `group`: the ranks that gather together."""

    def __init__(
        self,
        shards: BlockShards,
        group: Axis,
        device: torch.device,
        *,
        environment: Mapping[str, str] = os.environ,
        memory: Callable[[torch.device], DeviceMemory | None] = memory_of_device,
    ) -> None:
        self._shards, self._device, self._memory = shards, device, memory
        self._group = replace(group, traffic=Traffic(show_waiting=group.traffic.show_waiting))  # not counted
        self._on = environment.get(WHOLE_BLOCKS) != OFF
        self._on_gpus: bool | None = None  # all ranks that gather together; None: not asked yet
        self._taken: OrderedDict[Hashable, int] = OrderedDict()  # bytes that torch takes for a step, by its form
        self._forms: deque[Hashable] = deque(maxlen=TURNS)  # of the last steps, which may take turns
        self._measured: Hashable = None  # the form of the step under way, where it is to be known

    def begin(self, form: Hashable, *, wanted: bool = True) -> None:
        """A step of this form begins, on every rank of the group; `wanted` alike: blocks may stay whole."""
        if self._on_gpus is None:
            there = self._memory(self._device) is not None
            self._on_gpus = all(count for count, _ in self._said_by_all(int(there)))
        memory, most = self._memory(self._device), 0
        if memory is None or not self._on_gpus:
            return
        unknown = form not in self._taken
        self._forms.append(form)
        if not unknown and wanted and self._on:
            taken = max(self._taken.get(each, 0) for each in self._forms)
            spare = memory.free + memory.reserved - taken - round(WHOLE_LEAVE * memory.total)
            most = self._shards.most_staying(spare)
        said = self._said_by_all(most)
        if len({staying for _, staying in said}) > 1:  # as some were asked for their memory
            self._shards.keep(0)
        most = min(count for count, _ in said)
        self._shards.keep(most)
        self._measured = None
        if unknown and wanted and self._on and most == 0:
            give_back_cached(self._device)
            self._measured = form

    def end(self) -> None:
        """The step has ended, on the host."""
        memory = self._memory(self._device)
        if self._measured is None or memory is None:
            return
        self._taken[self._measured] = memory.reserved
        self._measured = None
        if len(self._taken) > FORMS:
            self._taken.popitem(last=False)

    def drop(self) -> None:
        """Have none stay, as others want the memory. Ranks that were not asked do so when the next step begins."""
        self._shards.keep(0)

    def _said_by_all(self, most: int) -> list[tuple[int, int]]:
        """How many blocks each rank has room for, and which stay there now."""
        mine, size = (most, self._shards.staying), self._group.size
        if size == 1:
            return [mine]
        sent = torch.tensor(mine, dtype=torch.int64, device=self._device)
        received = torch.empty(size, len(mine), dtype=torch.int64, device=self._device)
        bytes_of_all = received.view(torch.uint8).flatten()
        self._group.start_all_gather(sent.view(torch.uint8), bytes_of_all).wait()
        return [(int(count), int(staying)) for count, staying in received.tolist()]
