"""The blocks of one of ComfyUI's modules with a part of their weights on each rank, whole only while they compute.

Owns which bytes of a block this rank holds, the hooks that make a block whole before it runs, and which of them then
stay so; how many may is `whole_blocks.py`'s. How the bytes of ranks come together is `unit_feed.py`'s, where a weight
lies in them `unit_layout.py`'s. What stands outside the blocks is whole on every rank. A quantised weight is the plain
tensors that it is made of.

Blocks run in an order that only the module knows: the first call asks for each as it comes, and those after it have the
next one under way while a block computes. Every rank of the group makes the same calls.
"""

import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby

import torch

from ..models.block_chain import GATHER, hook_entries
from ..models.parts import Make, as_parameter, plain_parts
from ..parallel.collectives import Axis
from ..timing import wait_for
from .host_memory import host_bytes
from .unit_feed import UnitFeed
from .unit_layout import UnitLayout

META = torch.device("meta")
LISTS = (torch.nn.ModuleList, torch.nn.Sequential)
GOLDEN = (5**0.5 - 1) / 2  # of a circle: so many steps on, the next place lies in the widest gap


class Unit:
    """One block: its weights by path, what the file says of them, and this rank's bytes of them as they are now."""

    def __init__(
        self,
        path: str,
        block: torch.nn.Module,
        rounded: Mapping[str, torch.dtype],
        *,
        shards: int,
        shares: tuple[int, ...],
    ) -> None:
        """`rounded`: weights that are held in another dtype than the file's."""
        self.rounded = rounded
        self.owners: dict[str, tuple[torch.nn.Module, str]] = {}  # by path, the module that has it and its name there
        self.pristine: dict[str, torch.nn.Parameter] = {}
        self.changed: frozenset[str] = frozenset()  # weights that are not what the file says
        for below, owner in block.named_modules():
            for name, weight in owner._parameters.items():
                if weight is not None:
                    full = ".".join(part for part in (path, below, name) if part)
                    self.owners[full] = owner, name
                    self.pristine[full] = weight
        self._shards, self._shares = shards, shares
        self.lay_out({})

    def lay_out(self, changed: Mapping[str, torch.nn.Parameter]) -> None:
        """Find a place for every plain tensor of every weight; those not in `changed` are what the file says."""
        self.changed = frozenset(changed)
        self.makes: dict[str, tuple[Make, int]] = {}
        sizes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        for path in self.owners:
            parts, make = plain_parts(changed.get(path, self.pristine[path]))
            if path in self.rounded and path not in changed:
                parts = [parts[0].to(META, self.rounded[path])]
            self.makes[path] = make, len(parts)
            sizes |= {f"{path}#{number}": (part.dtype, tuple(part.shape)) for number, part in enumerate(parts)}
        self.layout = UnitLayout(sizes, shards=self._shards, shares=self._shares)

    def cut(self, shard: torch.Tensor, index: int, changed: Mapping[str, torch.nn.Parameter]) -> None:
        """Copy what the rank of that index holds of every weight into its bytes, `shard`; `changed` as `lay_out`."""
        for path in self.owners:
            parts, _ = plain_parts(changed.get(path, self.pristine[path]))
            if path in self.rounded and path not in changed:
                parts = [parts[0].to(self.rounded[path])]
            for number, part in enumerate(parts):
                elements, mine = self.layout.part(f"{path}#{number}", shard, index)
                if mine.numel():
                    mine.copy_(part.reshape(-1)[elements])

    def whole(self, received: torch.Tensor) -> dict[str, torch.nn.Parameter]:
        """Every weight as a view of the whole unit's bytes."""
        views = self.layout.views(received)
        return {
            path: as_parameter(make([views[f"{path}#{number}"] for number in range(count)]))
            for path, (make, count) in self.makes.items()
        }


class BlockShards:
    """The weights of `blocks`, modules of one model by path, spread over `group`; `offloaded`: kept on the host."""

    collective = True  # what was changed before is gathered

    def __init__(
        self,
        blocks: Mapping[str, torch.nn.Module],
        group: Axis,
        *,
        rounded: Mapping[str, torch.dtype],
        device: torch.device,
        offloaded: bool,
        methods: Callable[[str], Iterable[str]] | None = None,
        shares: tuple[int, ...] = (),
    ) -> None:
        """`rounded`: weights that are held in another dtype than the file's, by path. `shares`: how much each rank of
        the group holds compared with the others, () for equal ones.

        `methods`: by which methods the model calls the block at a path; by `forward` where it is left out.
        """
        self.device, self.offloaded = device, offloaded
        self._index = group.index
        self._rooms: dict[str, torch.Tensor] = {}  # for the bytes of blocks that will stay whole
        self._staying: dict[str, torch.Tensor] = {}  # the bytes of those that do
        self._freed = False
        self._units = {
            path: Unit(path, block, rounded, shards=group.size, shares=shares) for path, block in blocks.items()
        }
        self._feed = UnitFeed(group, self._lengths, device=device, offloaded=offloaded)
        self._shards: dict[str, torch.Tensor] = {}
        self._whole: dict[tuple[str, int], dict[str, torch.nn.Parameter]] = {}  # by unit and where its bytes lie
        self._ran: list[str] = []  # blocks in the order of the last call, and of the present one
        self._running: list[str] = []
        self._order: list[str] = []  # those of the last call that are to be put together
        self._asked: list[str] = []
        self._unit_of = {owner: path for path, unit in self._units.items() for owner in unit.owners}
        # Any first ones of them lie far apart, so a block that is gathered has others to hide behind.
        places = sorted(range(len(blocks)), key=lambda place: place * GOLDEN % 1)
        self._spread = [list(blocks)[place] for place in places]
        self.idle = False  # blocks are called, and do not run: none is gathered
        for path, block in blocks.items():
            entries = ("forward",) if methods is None else methods(path)
            hook_entries(block, entries, GATHER, before=partial(self._arrive, path), after=partial(self._release, path))

    @property
    def num_bytes(self) -> int:
        """Bytes of blocks that this rank holds."""
        return sum(shard.nbytes for shard in self._shards.values())

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers in which blocks become whole."""
        return self._feed.buffer_bytes

    @property
    def staying_bytes(self) -> int:
        """Bytes that blocks which stay whole, or will, take of the device besides this rank's part of them."""
        return sum(room.nbytes for room in self._rooms.values()) + sum(map(self._more_bytes, self._staying))

    @property
    def staying(self) -> int:
        """A number that tells which blocks stay whole, and which will, from others."""
        return zlib.crc32("|".join(",".join(sorted(each)) for each in (self._staying, self._rooms)).encode())

    def most_staying(self, num_bytes: int) -> int:
        """How many blocks can stay whole in so many bytes, those counted that do. What this rank has of another block
        is given back only once that stays, so later there may be room for more."""
        for count, path in enumerate(self._spread):
            num_bytes -= self._more_bytes(path) if path in self._staying else self._units[path].layout.num_bytes
            if num_bytes < 0:
                return count
        return len(self._spread)

    def lack_rooms(self, count: int) -> bool:
        """Whether any of so many blocks neither stay whole nor have room to."""
        return any(path not in self._staying and path not in self._rooms for path in self._spread[:count])

    def make_rooms(self, count: int) -> int:
        """Have room for so many blocks to stay whole; for how many there is. Each takes memory of its own before the
        call that fills it: none of what a call computes in is cut up for it."""
        for number, path in enumerate(self._spread[:count]):
            if path not in self._staying and path not in self._rooms:
                num_bytes = self._units[path].layout.num_bytes
                try:
                    self._rooms[path] = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
                except torch.OutOfMemoryError:
                    return number
        return count

    def take_freed(self) -> bool:
        """Whether parts of blocks were freed since this was asked last, as they lie in a block that stays."""
        freed, self._freed = self._freed, False
        return freed

    def keep(self, count: int) -> None:
        """Have so many blocks stay whole, from their next call on, of those that have room; no others any more.

        Every rank of the group keeps as many, and has the same ones (`staying`).
        """
        stay = set(self._spread[:count])
        self._rooms = {path: room for path, room in self._rooms.items() if path in stay}
        for path in self._staying.keys() - stay:
            self._stop_staying(path)

    def load(self) -> Iterator[int]:
        """Cut this rank's part out of every block; yields the bytes of blocks done so far."""
        done = 0
        for path, unit in self._units.items():
            self._cut(path, {})
            self._release(path)
            done += unit.layout.num_bytes
            yield done
        self._feed.fit(self._units)

    def begin(self) -> None:
        """A call of the model begins: the first block of the last call's order is on its way when this returns."""
        self._asked, self._running = [], []
        gathered = (path for path in self._ran if path not in self._staying)
        self._order = [path for path, _ in groupby(gathered)]
        self._feed.begin(self._order, self._shards)

    def end(self) -> None:
        """The call has ended, or raised."""
        self._feed.end()
        self._ran = self._running

    def pristine(self, path: str) -> torch.nn.Parameter | None:
        """A weight of a block as the file says it, on the host; None for one outside of the blocks."""
        unit = self._unit_of.get(path)
        return None if unit is None else self._units[unit].pristine[path]

    def by_block(self, paths: Iterable[str]) -> list[list[str]]:
        """The same weights, those of one block together."""
        groups: dict[str | None, list[str]] = {}
        for path in paths:
            groups.setdefault(self._unit_of.get(path), []).append(path)
        return list(groups.values())

    def change(self, weights: Mapping[str, torch.nn.Parameter | None]) -> None:
        """Have these weights of one block, whole and on any device; None: what the file says.

        Every rank of the group changes the same ones: what was changed before is gathered, and cut anew.
        """
        (path,) = {self._unit_of[name] for name in weights}
        unit = self._units[path]
        self._stop_staying(path)
        changed = {name: weight for name, weight in weights.items() if weight is not None}
        if kept := unit.changed - weights.keys():
            self._feed.begin([path], self._shards)
            whole = unit.whole(self._feed.take(path))
            changed |= {name: whole[name] for name in kept}
        unit.lay_out(changed)
        self._cut(path, changed)
        self._feed.end()
        self._whole.clear()
        self._feed.fit(self._units)

    def _lengths(self, path: str) -> tuple[int, ...]:
        """Bytes of a block that each rank holds."""
        return self._units[path].layout.lengths

    def _cut(self, path: str, changed: Mapping[str, torch.nn.Parameter]) -> None:
        held = self._lengths(path)[self._index]
        if self.offloaded and path in self._shards:
            wait_for(self.device)  # a copy from its pages may be under way
        self._shards.pop(path, None)  # the old goes before the new comes
        if self.offloaded:
            shard = host_bytes(held, device=self.device)
        else:
            shard = torch.zeros(held, dtype=torch.uint8, device=self.device)
        self._units[path].cut(shard, self._index, changed)
        self._shards[path] = shard

    def _arrive(self, path: str) -> None:
        """Before a block runs: have it whole. One that runs again before any other is still there."""
        if self.idle:
            return
        if self._running[-1:] != [path]:
            self._running.append(path)
        if path in self._staying:
            return
        again = self._asked[-1:] == [path]
        if not again and self._order[len(self._asked) : len(self._asked) + 1] != [path]:
            self._feed.end()  # another order than before, on all ranks
            self._order = []
            self._feed.begin([path], self._shards)
        if not again:
            self._asked.append(path)
        received = self._feed.take(path)
        unit, key = self._units[path], (path, received.data_ptr())
        if path in self._rooms:
            whole = unit.whole(self._stays(path, received))
        else:
            if key not in self._whole:
                self._whole[key] = unit.whole(received)
            whole = self._whole[key]
        for name, (owner, own_name) in unit.owners.items():
            owner._parameters[own_name] = whole[name]

    def _release(self, path: str) -> None:
        """After a block ran: its weights are the next one's buffer soon, unless it stays."""
        if path in self._staying:
            return
        for owner, own_name in self._units[path].owners.values():
            owner._parameters[own_name] = None

    def _more_bytes(self, path: str) -> int:
        """Bytes of the device that a block takes more where it stays whole."""
        layout = self._units[path].layout
        return layout.num_bytes - (0 if self.offloaded else layout.lengths[self._index])

    def _stays(self, path: str, received: torch.Tensor) -> torch.Tensor:
        """The bytes of a block that stays from now on; what this rank has of them is a view."""
        whole = self._staying[path] = self._rooms.pop(path).copy_(received)
        if not self.offloaded:
            lengths = self._lengths(path)
            begin = sum(lengths[: self._index])
            self._shards[path] = whole[begin : begin + lengths[self._index]]
            self._freed = True
        return whole

    def _stop_staying(self, path: str) -> None:
        """A block that may stay whole is so no longer."""
        self._rooms.pop(path, None)
        if self._staying.pop(path, None) is None:
            return
        if not self.offloaded:
            self._shards[path] = self._shards[path].clone()
        self._release(path)


def blocks_of(
    module: torch.nn.Module, lists: Sequence[str], *, inner: Collection[str] = ()
) -> dict[str, torch.nn.Module]:
    """The blocks of a model by path: the modules in those of the lists named that it has, else in its outermost lists.

    Of lists in lists, and of modules that only call their parts in turn, the parts: a model may call those itself.
    `inner`: lists inside a block, whose modules are blocks in its place; what it has besides them is none's.
    """
    modules = dict(module.named_modules())
    found = [(name, modules[name]) for name in lists if name in modules] or list(_outermost_lists(module))
    return {
        path: block
        for name, each in found
        for path, block in _parts(name, each, inner)
        if any(True for _ in block.parameters())
    }


def _parts(path: str, module: torch.nn.Module, inner: Collection[str]) -> Iterator[tuple[str, torch.nn.Module]]:
    deeper = list(module.named_children())
    if not isinstance(module, LISTS):
        deeper = [(name, child) for name, child in deeper if name in inner and isinstance(child, LISTS)]
    if not deeper:
        yield path, module
    for name, child in deeper:
        yield from _parts(f"{path}.{name}", child, inner)


def _outermost_lists(module: torch.nn.Module, path: str = "") -> Iterator[tuple[str, torch.nn.Module]]:
    for name, child in module.named_children():
        below = f"{path}.{name}" if path else name
        if isinstance(child, torch.nn.ModuleList):
            yield below, child
        else:
            yield from _outermost_lists(child, below)
