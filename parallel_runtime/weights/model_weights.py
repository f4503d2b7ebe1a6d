"""All weights of a model of blocks of ours, on every rank; what the doctor measures devices with.

Letters: `O` rows and `I` columns of a weight.

On the CPU, weights in the file's own dtype stay views of the mapped file: ranks share its pages and hold no copy. Knows
no arithmetic: names and shapes come from the adapter's config.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..errors import RequestCancelledError
from .model_file import ModelFile

ALL = slice(None)


@dataclass(frozen=True)
class BlockWeights:
    """Weights by their names within the block, in the compute dtype."""

    tensors: Mapping[str, torch.Tensor]

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def linear(self, name: str, x: torch.Tensor, *, rows: slice = ALL, columns: slice = ALL) -> torch.Tensor:
        """x (..., columns) through the linear layer `name`, or these rows of it, to (..., rows)."""
        weight, bias = self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"]
        if rows is not ALL:
            weight, bias = weight[rows], bias[rows]
        return F.linear(x, weight if columns is ALL else weight[:, columns], bias)

    def add_linear(self, out: torch.Tensor, name: str, x: torch.Tensor, *, columns: slice) -> None:
        """Add to out (..., O), contiguous, what `linear` of other columns left out: x (..., columns) through these."""
        weight = self.tensors[f"{name}.weight"][:, columns]
        out.view(-1, out.shape[-1]).addmm_(x.reshape(-1, x.shape[-1]), weight.t())


class ReplicatedWeights:
    """Every weight of the model on this rank, grouped by block. Nothing is read before `load`."""

    def __init__(self, file: ModelFile, *, device: torch.device) -> None:
        self._file = file
        self.dtype = file.dtype
        self.device = device
        self.viewed_file = file.mapped if any(map(self._is_view, file.entries)) else None
        self._groups: dict[str, dict[str, torch.Tensor]] = {prefix: {} for prefix in self._file.units}
        self._units = {prefix: BlockWeights(held) for prefix, held in self._groups.items()}

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the weights this rank holds."""
        return sum(tensor.nbytes for group in self._groups.values() for tensor in group.values())

    @property
    def device_bytes(self) -> int:
        """Bytes that they take on the device."""
        return self.parameter_bytes

    def block(self, prefix: str) -> AbstractContextManager[BlockWeights]:
        """The weights of one block by their names within it, in the compute dtype; `""` is all outside the blocks."""
        unit = self._units[prefix]
        if prefix in self._file.fp8_units:
            unit = BlockWeights(self._file.computable(prefix, unit.tensors))
        return nullcontext(unit)

    def load(self, *, progress: Callable[[int, int], None], cancelled: Callable[[], bool]) -> None:
        """Read all weights in the order of the file. `progress` takes bytes done and to do.

        Raises `RequestCancelledError` as soon as `cancelled()` is true.
        """
        total, before = sum(entry.num_bytes for entry in self._file.entries.values()), 0
        for name, entry in self._file.in_file_order():
            for done in self._read(name):
                if cancelled():
                    raise RequestCancelledError("loading was cancelled")
                progress(before + done, total)
            before += entry.num_bytes
        self._file.mapped.refuse_changed()

    def _read(self, name: str) -> Iterator[int]:
        """Have one weight as the file says; yields the bytes done so far."""
        entry, dtype = self._file.entries[name], self._file.storage_dtype(name)
        prefix, within = self._file.place(name)
        group = self._groups[prefix]
        if self._is_view(name):
            group[within] = self._file.pristine(name)
            return self._file.mapped.read(entry)
        group[within] = torch.empty(entry.shape, dtype=dtype, device=self.device)
        return self._file.mapped.copy_into(group[within], entry)

    def _is_view(self, name: str) -> bool:
        return self.device.type == "cpu" and self._file.entries[name].dtype == self._file.storage_dtype(name)
