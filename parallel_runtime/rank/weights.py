"""One model's weights on one rank: what is read of the file, where it lies, and how a block's are had.

Owns loading, patching and restoring. On the CPU, weights in the file's own dtype stay views of the mapped file: ranks
share its pages and hold no copy. A patched weight is always made from the file's rows, so taking a patch back is
reading them again. Knows no arithmetic: names and shapes come from the adapter's config.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from ..adapters.flux_config import canonical_name, scale_names
from ..checkpoint import CheckpointHeader
from ..errors import RequestCancelledError
from ..patch import Patch
from .branches import BlockWeights, Branch
from .mapped_file import MappedFile
from .patches import merge

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def compute_dtype(header: CheckpointHeader, names: Mapping[str, str], asked: str) -> torch.dtype:
    """The dtype the model runs in: what was asked, else the one most of the file's weights have (fp8 runs in bf16)."""
    if asked != "default":
        dtype = getattr(torch, asked)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"dtype={asked!r} is unknown; use default, float32, bfloat16 or float16")
        return dtype
    sizes: Counter[torch.dtype] = Counter()
    for name in names.values():
        sizes[header.tensors[name].dtype] += header.tensors[name].num_bytes
    dtype = sizes.most_common(1)[0][0]
    return torch.bfloat16 if dtype in FLOAT8 else dtype


class ReplicatedWeights:
    """Every weight of the model on this rank, grouped by block.

    `names` maps a weight's canonical name to the file's; `prefixes` are the blocks'; `scales` maps the canonical name
    of an fp8 weight to the file's name of its scale. Nothing is read before `load`.
    """

    def __init__(
        self,
        header: CheckpointHeader,
        *,
        file: MappedFile,
        names: Mapping[str, str],
        scales: Mapping[str, str],
        prefixes: tuple[str, ...],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._entries = {canonical: header.tensors[name] for canonical, name in names.items()}
        self._file = file
        self._scales = {name: float(self._file.tensor(header.tensors[scale])) for name, scale in scales.items()}
        self.dtype = dtype
        self.device = device
        self._groups: dict[str, dict[str, torch.Tensor]] = {prefix: {} for prefix in ("", *prefixes)}
        self._branches: dict[str, dict[str, list[Branch]]] = {prefix: {} for prefix in self._groups}
        self._patched: set[str] = set()

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the weights this rank holds."""
        return sum(tensor.nbytes for group in self._groups.values() for tensor in group.values())

    @contextmanager
    def block(self, prefix: str) -> Iterator[BlockWeights]:
        """The weights of one block by their names within it, in the compute dtype; `""` is all outside the blocks."""
        group = self._groups[prefix]
        if any(tensor.dtype in FLOAT8 for tensor in group.values()):
            group = {name: self._computable(prefix + name, tensor) for name, tensor in group.items()}
        yield BlockWeights(group, self._branches[prefix])

    def _computable(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """An fp8 weight in the compute dtype and to its scale; any other as it is."""
        if tensor.dtype not in FLOAT8:
            return tensor
        return self._scaled(name, tensor.to(self.dtype))

    def _scaled(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.mul_(self._scales[name]) if name in self._scales else tensor

    def refuse_changed_file(self) -> None:
        """Raise `ValueError` when weights of this rank lie in the file's own pages and somebody wrote to it."""
        if any(self._is_view(name) for name in self._entries):
            self._file.refuse_changed()

    def load(self, *, progress: Callable[[int, int], None], cancelled: Callable[[], bool]) -> None:
        """Read the weights piece by piece, in the order of the file. `progress` takes bytes done and to do.

        Raises `RequestCancelledError` as soon as `cancelled()` is true.
        """
        total, before = sum(entry.num_bytes for entry in self._entries.values()), 0
        for name, entry in sorted(self._entries.items(), key=lambda item: item[1].start):
            for done in self._read(name):
                if cancelled():
                    raise RequestCancelledError("loading was cancelled")
                progress(before + done, total)
            before += entry.num_bytes
        self._file.refuse_changed()

    def patch(self, name: str, patches: Sequence[Patch]) -> None:
        """Make one weight its pristine self with `patches`. Raises `ValueError` when they do not fit.

        A patched fp8 weight is kept in the compute dtype: rounded to fp8 again it would lose the patch.
        """
        self._check_known(name)
        self._file.refuse_changed()
        prefix, within = self._place(name)
        group = self._groups[prefix]
        pristine = self._file.tensor(self._entries[name])
        if pristine.dtype in FLOAT8:
            pristine = self._scaled(name, pristine.to(torch.float32))
        if name not in self._patched and (self._is_view(name) or group[within].dtype != self.dtype):
            group[within] = torch.empty(pristine.shape, dtype=self.dtype, device=self.device)
        self._patched.add(name)
        merge(pristine, patches, group[within])

    def set_beside(self, branches: Mapping[str, list[Branch]]) -> None:
        """Run these LoRAs beside the weights they are for, by canonical name, and no others."""
        for held in self._branches.values():
            held.clear()
        for name, beside in branches.items():
            self._check_known(name)
            for branch in beside:
                branch.check_fit(self._entries[name].shape)
            prefix, within = self._place(name)
            self._branches[prefix][within] = beside

    def _check_known(self, name: str) -> None:
        if name not in self._entries:
            raise ValueError(f"a patch names {name}, which this model has not; use one made for this model")

    def restore_all_but(self, names: Collection[str]) -> None:
        """Make every patched weight that is not in `names` what the file says, bit for bit."""
        for name in sorted(self._patched - set(names)):
            self._file.refuse_changed()
            for _ in self._read(name):
                pass
            self._patched.discard(name)

    def _read(self, name: str) -> Iterator[int]:
        """Have one weight as the file says; yields the bytes done so far. What lies there keeps its memory."""
        entry = self._entries[name]
        prefix, within = self._place(name)
        group = self._groups[prefix]
        if self._is_view(name):
            group[within] = self._file.tensor(entry)
            return self._file.read(entry)
        if within not in group or group[within].dtype != self._storage_dtype(name):
            group[within] = torch.empty(entry.shape, dtype=self._storage_dtype(name), device=self.device)
        return self._file.copy_into(group[within], entry)

    def _storage_dtype(self, name: str) -> torch.dtype:
        """fp8 weights stay fp8 in memory and are cast for computing; others are stored as they are computed with."""
        dtype = self._entries[name].dtype
        return dtype if dtype in FLOAT8 else self.dtype

    def _is_view(self, name: str) -> bool:
        return self.device.type == "cpu" and self._entries[name].dtype == self._storage_dtype(name)

    def _place(self, name: str) -> tuple[str, str]:
        """The prefix of the block a weight belongs to, and its name within it."""
        kind, _, rest = name.partition(".")
        number, _, within = rest.partition(".")
        prefix = f"{kind}.{number}."
        return (prefix, within) if prefix in self._groups else ("", name)


def weight_bytes(header: CheckpointHeader, names: Mapping[str, str], dtype: torch.dtype) -> int:
    """Bytes of all weights as a rank keeps them: fp8 as it is, everything else in the compute dtype."""
    entries = [header.tensors[name] for name in names.values()]
    return sum(e.num_bytes if e.dtype in FLOAT8 else e.num_bytes // e.dtype.itemsize * dtype.itemsize for e in entries)


def file_names(header: CheckpointHeader, prefix: str, wanted: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Where each wanted weight stands in the file: canonical name to the file's name."""
    present = {canonical_name(name[len(prefix) :]): name for name in header.tensors if name.startswith(prefix)}
    return {name: present[name] for name in wanted}


def file_scales(header: CheckpointHeader, names: Mapping[str, str]) -> dict[str, str]:
    """Where the scale of each fp8 weight stands: canonical name to the file's name of the scale."""
    found = {
        canonical: [scale for scale in scale_names(name) if scale in header.tensors]
        for canonical, name in names.items()
        if header.tensors[name].dtype in FLOAT8
    }
    return {canonical: scales[0] for canonical, scales in found.items() if scales}
