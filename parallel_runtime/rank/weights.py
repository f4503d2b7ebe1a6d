"""One model's weights on one rank: what is read of the file, where it lies, and how a block's are had.

Owns loading. On the CPU, weights in the file's own dtype stay views of the mapped file: ranks share its pages and hold
no copy. Knows no arithmetic: names and shapes come from the adapter's config.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from ..adapters.flux_config import canonical_name
from ..checkpoint import CheckpointHeader
from ..errors import RequestCancelledError
from .mapped_file import MappedFile

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
    """Every weight of the model on this rank, grouped by block."""

    def __init__(self, groups: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        self._groups = groups

    @property
    def parameter_bytes(self) -> int:
        """Bytes of the weights this rank holds."""
        return sum(tensor.nbytes for group in self._groups.values() for tensor in group.values())

    @contextmanager
    def block(self, prefix: str) -> Iterator[Mapping[str, torch.Tensor]]:
        """The weights of one block by their names within it; `""` is everything outside the blocks."""
        yield self._groups[prefix]

    @classmethod
    def load(
        cls,
        header: CheckpointHeader,
        *,
        names: Mapping[str, str],
        prefixes: tuple[str, ...],
        dtype: torch.dtype,
        device: torch.device,
        progress: Callable[[int, int], None],
        cancelled: Callable[[], bool],
    ) -> "ReplicatedWeights":
        """Read the weights piece by piece. `names` maps a canonical name to the file's; `prefixes` are the blocks'.

        Raises `RequestCancelledError` as soon as `cancelled()` is true; what was read is dropped.
        """
        groups: dict[str, dict[str, torch.Tensor]] = {prefix: {} for prefix in ("", *prefixes)}
        total = sum(header.tensors[name].num_bytes for name in names.values())
        file, before = MappedFile(header.path), 0
        for canonical, name in sorted(names.items(), key=lambda item: header.tensors[item[1]].start):
            entry = header.tensors[name]
            prefix, within = _group_of(canonical, groups)
            if device.type == "cpu" and entry.dtype == dtype:
                groups[prefix][within], reading = file.tensor(entry), file.read(entry)
            else:
                target = torch.empty(entry.shape, dtype=dtype, device=device)
                groups[prefix][within], reading = target, file.copy_into(target, entry)
            for done in reading:
                if cancelled():
                    raise RequestCancelledError("loading was cancelled")
                progress(before + done, total)
            before += entry.num_bytes
        return cls(groups)


def file_names(header: CheckpointHeader, prefix: str, wanted: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Where each wanted weight stands in the file: canonical name to the file's name."""
    present = {canonical_name(name[len(prefix) :]): name for name in header.tensors if name.startswith(prefix)}
    return {name: present[name] for name in wanted}


def _group_of(canonical: str, groups: Mapping[str, object]) -> tuple[str, str]:
    kind, _, rest = canonical.partition(".")
    number, _, within = rest.partition(".")
    prefix = f"{kind}.{number}."
    return (prefix, within) if prefix in groups else ("", canonical)
