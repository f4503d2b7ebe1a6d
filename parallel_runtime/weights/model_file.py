"""What one model's file says of its weights: where each stands, the block it belongs to, what it is kept as.

Owns names, scales and dtypes by canonical name, and the mapped file. Keeps no weight (model_weights.py).
"""

from collections import Counter
from collections.abc import Mapping

import torch

from ..checkpoint import CheckpointHeader, TensorEntry
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


def weight_bytes(header: CheckpointHeader, names: Mapping[str, str], dtype: torch.dtype) -> int:
    """Bytes of all weights as a rank keeps them: fp8 as it is, everything else in the compute dtype."""
    entries = [header.tensors[name] for name in names.values()]
    return sum(e.num_bytes if e.dtype in FLOAT8 else e.num_bytes // e.dtype.itemsize * dtype.itemsize for e in entries)


class ModelFile:
    """A file's weights by canonical name, grouped in units: the blocks by their prefixes, and `""`, all outside them.

    `header` and `file` are of the same file. `names` maps a weight's canonical name to the file's; `scales` maps the
    canonical name of an fp8 weight to the file's name of its scale. Of the file's weights, only the scales are read.
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
        """`device` computes with the weights, wherever they lie."""
        self.entries = {canonical: header.tensors[name] for canonical, name in names.items()}
        self.mapped = file
        self.scales = {name: float(self.mapped.tensor(header.tensors[scale])) for name, scale in scales.items()}
        self.dtype = dtype
        self.device = device
        self.units: dict[str, list[str]] = {prefix: [] for prefix in ("", *prefixes)}
        for name in self.entries:
            self.units[self.place(name)[0]].append(name)
        self.fp8_units = {prefix for prefix, names in self.units.items() if any(map(self.is_fp8, names))}

    def in_file_order(self) -> list[tuple[str, TensorEntry]]:
        """All weights as they stand in the file, so that reading them goes through it once."""
        return sorted(self.entries.items(), key=lambda item: item[1].start)

    def place(self, name: str) -> tuple[str, str]:
        """The prefix of the unit a weight belongs to, and its name within it."""
        kind, _, rest = name.partition(".")
        number, _, within = rest.partition(".")
        prefix = f"{kind}.{number}."
        return (prefix, within) if prefix in self.units else ("", name)

    def is_fp8(self, name: str) -> bool:
        """Whether the file has the weight in fp8."""
        return self.entries[name].dtype in FLOAT8

    def storage_dtype(self, name: str) -> torch.dtype:
        """fp8 weights stay fp8 in memory and are cast for computing; others are stored as they are computed with."""
        return self.entries[name].dtype if self.is_fp8(name) else self.dtype

    def scale(self, name: str) -> float:
        """What the file's values of a weight are to be multiplied with."""
        return self.scales.get(name, 1.0)

    def pristine(self, name: str) -> torch.Tensor:
        """The weight as the file has it, unscaled: a view of the mapping, not to be written to."""
        return self.mapped.tensor(self.entries[name])

    def computable(self, prefix: str, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The weights of a unit, by their names within it, in the compute dtype and to their scales."""
        if prefix not in self.fp8_units:
            return tensors
        return {
            within: self.scaled(prefix + within, tensor.to(self.dtype)) if tensor.dtype in FLOAT8 else tensor
            for within, tensor in tensors.items()
        }

    def scaled(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Multiply file values of an fp8 weight, in another dtype by now, with its scale, in place.

        Where a CPU computes, the scale is rounded to that dtype first. ComfyUI's kernel for the CPU does so
        (comfy_kitchen/backends/eager/quantization.py); those for GPUs multiply in fp32.
        """
        if name not in self.scales:
            return tensor
        scale = self.scales[name]
        return tensor.mul_(torch.tensor(scale, dtype=tensor.dtype).item() if self.device.type == "cpu" else scale)
