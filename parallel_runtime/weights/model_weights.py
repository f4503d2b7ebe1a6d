"""What a model's weights on one rank offer, one block of them in use, and the plain kind: all of them, on every rank.

Letters: `O` rows and `I` columns of a weight.

Owns loading, patching and restoring whole weights; a part of them is `sharded.py`'s. On the CPU, weights in the file's
own dtype stay views of the mapped file: ranks share its pages and hold no copy. A patched weight is always made from
the file's rows, so taking a patch back is reading them again. Knows no arithmetic: names and shapes come from the
adapter's config.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F

from ..errors import RequestCancelledError
from ..weight_patch import WeightPatch
from .branches import Branch
from .mapped_file import MappedFile
from .model_file import ModelFile, SideBranches
from .patches import merge

ALL = slice(None)


@dataclass(frozen=True)
class BlockWeights:
    """Weights by their names within the block, in the compute dtype, and the branches beside them."""

    tensors: Mapping[str, torch.Tensor]
    branches: Mapping[str, list[Branch]] = field(default_factory=dict)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def plain(self, names: tuple[str, ...]) -> tuple[torch.Tensor, ...] | None:
        """These weights, in this order; None when a branch runs beside one of them."""
        if self.branches and any(self.branches.get(name) for name in names):
            return None
        return tuple([self.tensors[name] for name in names])

    def linear(self, name: str, x: torch.Tensor, *, rows: slice = ALL, columns: slice = ALL) -> torch.Tensor:
        """x (..., columns) through the linear layer `name` and its branches, or these rows of it, to (..., rows)."""
        weight, bias = self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"]
        if rows is not ALL:
            weight, bias = weight[rows], bias[rows]
        out = F.linear(x, weight if columns is ALL else weight[:, columns], bias)
        self._add_branches(out, name, x, start=rows.start or 0, columns=columns)
        return out

    def add_linear(self, out: torch.Tensor, name: str, x: torch.Tensor, *, columns: slice) -> None:
        """Add to out (..., O), contiguous, what `linear` of other columns left out: x (..., columns) through these."""
        weight = self.tensors[f"{name}.weight"][:, columns]
        out.view(-1, out.shape[-1]).addmm_(x.reshape(-1, x.shape[-1]), weight.t())
        self._add_branches(out, name, x, start=0, columns=columns)

    def _add_branches(self, out: torch.Tensor, name: str, x: torch.Tensor, *, start: int, columns: slice) -> None:
        for branch in self.branches.get(f"{name}.weight", ()):
            branch.add_to(out, x, start=start, columns=columns)


class ModelWeights(Protocol):
    """One model's weights as the engine and a change of weights use them, however much of them this rank holds."""

    dtype: torch.dtype
    device: torch.device
    viewed_file: MappedFile | None  # the file that weights are views of: whoever uses them refuses it when it changed

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the weights this rank holds."""
        ...

    @property
    def device_bytes(self) -> int:
        """Bytes that they and what they need to be used take on the device."""
        ...

    def load(self, *, progress: Callable[[int, int], None], cancelled: Callable[[], bool]) -> None:
        """Read what this rank holds, in the order of the file. `progress` takes bytes done and to do.

        Raises `RequestCancelledError` as soon as `cancelled()` is true.
        """
        ...

    def begin(self, passes: int) -> None:
        """Say that the blocks are about to be gone through `passes` times, by this rank and those it shares with."""
        ...

    def join_gathers(self, beat: Callable[[], None]) -> None:
        """Take part in one pass without computing; `beat` is called after each block."""
        ...

    def block(self, prefix: str) -> AbstractContextManager[BlockWeights]:
        """The weights of one block by their names within it, in the compute dtype; `""` is all outside the blocks."""
        ...

    def end(self) -> None:
        """Go through the blocks no further, whatever `begin` said. All ranks of the group say so at the same block."""
        ...

    def patch(self, name: str, patches: Sequence[WeightPatch]) -> None:
        """Make one weight its pristine self with `patches`. Raises `ValueError` when they do not fit.

        A patched fp8 weight is kept in the compute dtype: rounded to fp8 again it would lose the patch.
        """
        ...

    def set_lora_branches(self, branches: Mapping[str, list[Branch]]) -> None:
        """Run these LoRAs beside the weights they are for, by canonical name, and no others."""
        ...

    def unpatch_except(self, names: Collection[str], beat: Callable[[], None]) -> None:
        """Make every patched weight that is not in `names` what the file says, bit for bit; `beat` after each piece."""
        ...


class ReplicatedWeights:
    """Every weight of the model on this rank, grouped by block: a `ModelWeights`. Nothing is read before `load`."""

    def __init__(self, file: ModelFile, *, device: torch.device) -> None:
        self._file = file
        self.dtype = file.dtype
        self.device = device
        self.viewed_file = file.mapped if any(map(self._is_view, file.entries)) else None
        self._groups: dict[str, dict[str, torch.Tensor]] = {prefix: {} for prefix in self._file.units}
        self._branches = SideBranches(self._file)
        self._units = {prefix: BlockWeights(held, self._branches[prefix]) for prefix, held in self._groups.items()}
        self._patched: set[str] = set()

    @property
    def parameter_bytes(self) -> int:
        """As `ModelWeights.parameter_bytes`: all of them."""
        return sum(tensor.nbytes for group in self._groups.values() for tensor in group.values())

    @property
    def device_bytes(self) -> int:
        return self.parameter_bytes

    def begin(self, passes: int) -> None:
        """Nothing: whatever is asked for is there."""

    def join_gathers(self, beat: Callable[[], None]) -> None:
        """Nothing: no other rank waits for this one's weights."""

    def end(self) -> None:
        """Nothing: no other rank waits for this one's weights."""

    def block(self, prefix: str) -> AbstractContextManager[BlockWeights]:
        unit = self._units[prefix]
        if prefix in self._file.fp8_units:
            unit = BlockWeights(self._file.computable(prefix, unit.tensors), unit.branches)
        return nullcontext(unit)

    def load(self, *, progress: Callable[[int, int], None], cancelled: Callable[[], bool]) -> None:
        """As `ModelWeights.load`, piece by piece."""
        total, before = sum(entry.num_bytes for entry in self._file.entries.values()), 0
        for name, entry in self._file.in_file_order():
            for done in self._read(name):
                if cancelled():
                    raise RequestCancelledError("loading was cancelled")
                progress(before + done, total)
            before += entry.num_bytes
        self._file.mapped.refuse_changed()

    def patch(self, name: str, patches: Sequence[WeightPatch]) -> None:
        if not self._file.holds(name):
            return
        self._file.mapped.refuse_changed()
        prefix, within = self._file.place(name)
        group, pristine = self._groups[prefix], self._file.pristine(name)
        if name not in self._patched and (self._is_view(name) or group[within].dtype != self.dtype):
            group[within] = torch.empty(pristine.shape, dtype=self.dtype, device=self.device)
        self._patched.add(name)
        merge(pristine, patches, group[within], scale=self._file.scale(name))

    def set_lora_branches(self, branches: Mapping[str, list[Branch]]) -> None:
        self._branches.set(branches)

    def unpatch_except(self, names: Collection[str], beat: Callable[[], None]) -> None:
        for name in sorted(self._patched - set(names)):
            self._file.mapped.refuse_changed()
            for _ in self._read(name):
                beat()
            self._patched.discard(name)

    def _read(self, name: str) -> Iterator[int]:
        """Have one weight as the file says; yields the bytes done so far. What lies there keeps its memory."""
        entry, dtype = self._file.entries[name], self._file.storage_dtype(name)
        prefix, within = self._file.place(name)
        group = self._groups[prefix]
        if self._is_view(name):
            group[within] = self._file.pristine(name)
            return self._file.mapped.read(entry)
        if within not in group or group[within].dtype != dtype:
            group[within] = torch.empty(entry.shape, dtype=dtype, device=self.device)
        return self._file.mapped.copy_into(group[within], entry)

    def _is_view(self, name: str) -> bool:
        return self.device.type == "cpu" and self._file.entries[name].dtype == self._file.storage_dtype(name)
