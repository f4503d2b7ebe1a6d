"""One model's weights with a part of each block on this rank, the whole of one or two blocks while they compute.

Owns which bytes of the file this rank reads and holds, and patching and restoring those. Where a weight lies in its
unit is `unit_layout.py`'s, how units become whole `unit_feed.py`'s. The idea is FSDP's (arXiv 2304.11277, sections 3.2
and 4.2: flat parameters, gathered one unit ahead); here the flat bytes are gathered where they are used, in any mix of
dtypes.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from ..errors import RequestCancelledError
from ..weight_patch import WeightPatch
from .branches import Branch
from .host_memory import host_bytes
from .mapped_file import MappedFile
from .model_file import ModelFile, SideBranches
from .model_weights import BlockWeights
from .patches import merge
from .unit_feed import ShardGroup, UnitFeed
from .unit_layout import ShardRange, UnitLayout


class ShardedWeights:
    """This rank's range of every unit's bytes: a `ModelWeights`. Nothing is read before `load`.

    `block` may be used between `begin` and the end of its passes alone, in the order of `prefixes` with `""` before and
    after: every rank of the group does the same.
    """

    viewed_file: MappedFile | None = None  # what this rank holds is copies

    def __init__(self, file: ModelFile, *, device: torch.device, group: ShardGroup, offloaded: bool = False) -> None:
        """`group` has the ranks to share with; `offloaded` keeps the shards on the host."""
        self._file = file
        self.dtype = file.dtype
        self.device = device
        self.offloaded = offloaded
        self._group = group
        self._feed = UnitFeed(group, device=device, offloaded=offloaded)
        self._layouts = {prefix: self._layout(prefix, patched=False) for prefix in self._file.units}
        self._shards: dict[str, torch.Tensor] = {}
        self._branches = SideBranches(self._file)
        self._patched: dict[str, set[str]] = {prefix: set() for prefix in self._file.units}

    @property
    def parameter_bytes(self) -> int:
        """As `ModelWeights.parameter_bytes`: its range of each unit, padded by at most 64 bytes a unit and a weight."""
        return sum(shard.nbytes for shard in self._shards.values())

    @property
    def device_bytes(self) -> int:
        """As `ModelWeights.device_bytes`: the shards, unless offloaded, and the buffers."""
        return (0 if self.offloaded else self.parameter_bytes) + self.buffer_bytes

    @property
    def needed_bytes(self) -> int:
        """Bytes on the device that `load` will take: the shards, unless offloaded, and the buffers."""
        shards = [layout.shard_bytes for layout in self._layouts.values()]
        staging = max(shards) if self.offloaded and self._group.size > 1 else 0
        return (0 if self.offloaded else sum(shards)) + staging + 2 * max(shards) * self._group.size

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers in which units become whole: two of the largest and, offloaded, one of its shard."""
        return self._feed.buffer_bytes

    @property
    def idle(self) -> bool:
        """Whether nothing is in flight between the ranks of the group."""
        return self._feed.idle

    def begin(self, passes: int) -> None:
        """As `ModelWeights.begin`; the first unit is on its way when it returns.

        One pass ends and the next begins with the same unit, which is then gathered once for both.
        """
        self._fit_buffers()
        blocks = [prefix for prefix in self._file.units if prefix]
        self._feed.begin(["", *([*blocks, ""] * passes)] if passes else [], self._shards)

    def join_gathers(self, beat: Callable[[], None]) -> None:
        """As `ModelWeights.join_gathers`: the others cannot gather a unit without this rank's part."""
        for prefix in (*self._file.units, ""):
            self._feed.take(prefix)
            beat()

    def end(self) -> None:
        """As `ModelWeights.end`: what is in flight comes in."""
        self._feed.end()

    @contextmanager
    def block(self, prefix: str) -> Iterator[BlockWeights]:
        """As `ModelWeights.block`: views of a buffer that is another block's afterwards."""
        views = self._layouts[prefix].views(self._feed.take(prefix))
        yield BlockWeights(self._file.computable(prefix, views), self._branches[prefix])

    def load(self, *, progress: Callable[[int, int], None], cancelled: Callable[[], bool]) -> None:
        """As `ModelWeights.load`: of the file, only what this rank holds is read."""
        self._fit_buffers()
        for prefix, layout in self._layouts.items():
            self._shards[prefix] = self._memory(layout)
        sizes = {
            name: (part.stop - part.first) * self._file.entries[name].dtype.itemsize for name, part in self._parts()
        }
        total, before = sum(sizes.values()), 0
        for name, _ in self._file.in_file_order():
            for done in self._read(name):
                if cancelled():
                    raise RequestCancelledError("loading was cancelled")
                progress(before + done, total)
            before += sizes[name]
        self._file.mapped.refuse_changed()

    def patch(self, name: str, patches: Sequence[WeightPatch]) -> None:
        """As `ModelWeights.patch`, for rows of which this rank holds a part; some kinds need the whole for a while.

        A unit with any patch is kept in the compute dtype as a whole, so that its layout changes once.
        """
        if not self._file.holds(name):
            return
        self._file.mapped.refuse_changed()
        prefix, _ = self._file.place(name)
        if not self._patched[prefix]:
            self._lay_out(prefix, patched=True)
        self._patched[prefix].add(name)
        part = self._part(name)
        merge(
            self._file.pristine(name),
            patches,
            part.of(self._shards[prefix]),
            scale=self._file.scale(name),
            first=part.first,
            device=self.device,
        )

    def set_lora_branches(self, branches: Mapping[str, list[Branch]]) -> None:
        """As `ModelWeights.set_lora_branches`: every rank holds all of them."""
        self._branches.set(branches)

    def unpatch_except(self, names: Collection[str], beat: Callable[[], None]) -> None:
        """As `ModelWeights.unpatch_except`, the pieces being units and weights."""
        for prefix, patched in self._patched.items():
            beat()
            gone = patched - set(names)
            if gone:
                self._file.mapped.refuse_changed()
            patched -= gone
            if gone and not patched and self._lay_out(prefix, patched=False):
                continue
            for name in sorted(gone):
                self._read_all([name])
                beat()
        self._fit_buffers()

    def _layout(self, prefix: str, *, patched: bool) -> UnitLayout:
        weights = {
            self._file.place(name)[1]: (
                self.dtype if patched else self._file.storage_dtype(name),
                self._file.entries[name].shape,
            )
            for name in self._file.units[prefix]
        }
        return UnitLayout(weights, shards=self._group.size)

    def _lay_out(self, prefix: str, *, patched: bool) -> bool:
        """Give a unit the layout it needs with or without patches; true when that is another, read from the file."""
        layout = self._layout(prefix, patched=patched)
        if layout.slots == self._layouts[prefix].slots:
            return False
        del self._shards[prefix]  # the old goes before the new comes
        self._layouts[prefix], self._shards[prefix] = layout, self._memory(layout)
        self._read_all(self._file.units[prefix])
        return True

    def _memory(self, layout: UnitLayout) -> torch.Tensor:
        if self.offloaded:
            return host_bytes(layout.shard_bytes, device=self.device)
        return torch.zeros(layout.shard_bytes, dtype=torch.uint8, device=self.device)

    def _fit_buffers(self) -> None:
        self._feed.fit(max(layout.shard_bytes for layout in self._layouts.values()))

    def _part(self, name: str) -> ShardRange:
        prefix, within = self._file.place(name)
        return self._layouts[prefix].part(within, self._group.index)

    def _parts(self) -> Iterator[tuple[str, ShardRange]]:
        return ((name, self._part(name)) for name in self._file.entries)

    def _read_all(self, names: Sequence[str]) -> None:
        for name in names:
            for _ in self._read(name):
                pass

    def _read(self, name: str) -> Iterator[int]:
        """Have this rank's part of a weight as the file says; yields the bytes of the file done so far."""
        part = self._part(name)
        if part.first == part.stop:
            return
        target = part.of(self._shards[self._file.place(name)[0]])
        yield from self._file.mapped.copy_into(target, self._file.entries[name].run(part.first, part.stop))
        if self._file.is_fp8(name) and part.dtype == self.dtype:
            self._file.scaled(name, target)
