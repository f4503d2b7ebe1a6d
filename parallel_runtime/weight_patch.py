"""A change of one weight as it travels from whoever made it to the ranks: plain values and named tensors.

Owns the record and its form on the wire. What a change does to a weight is `models/hosted/changes.py`'s.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Value = torch.Tensor | float | None
# Kinds that only ComfyUI's own functions merge: a LoRA with a core or another shape, a difference of another shape.
# And `beside`: no change, but a weight of a module that runs between the blocks (models/hosted/block_patches.py).
BESIDE = "beside"
HOSTED_KINDS = ("lora_core", "padded_diff", BESIDE)
KINDS = ("diff", "set", "lora", "loha", "lokr", "glora", "oft", "boft", *HOSTED_KINDS)

# What one message may carry; a weight with more than that is refused. And from how many bytes on the next one begins.
MAX_TENSORS = 512
MAX_RECORDS = 128
ENOUGH_BYTES = 1 << 28


@dataclass(frozen=True, kw_only=True)
class WeightPatch:
    """One change of one weight. `values` are the kind's own, in the order of ComfyUI's `weight_adapter`.

    `key` is the weight's canonical name. `offset` (dim, start, length) narrows the weight to what the patch is for;
    `swap` exchanges the halves of the change, for patches made for a layout with scale before shift;
    `strength_model` multiplies the weight first.
    """

    key: str
    kind: str
    strength: float
    values: tuple[Value, ...]
    strength_model: float = 1.0
    offset: tuple[int, int, int] | None = None
    swap: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"{self.key}: a patch of kind {self.kind!r} is unknown; use {', '.join(KINDS)}")

    @property
    def num_bytes(self) -> int:
        """Of its tensors."""
        return sum(value.nbytes for value in self.values if isinstance(value, torch.Tensor))

    @property
    def new_shape(self) -> tuple[int, ...] | None:
        """The shape that it gives its weight, by zeros at the end of each dimension; None where it keeps the shape."""
        if self.kind == "padded_diff" and isinstance(self.values[0], torch.Tensor):
            return tuple(self.values[0].shape)
        if self.kind == "lora_core" and isinstance(self.values[5], torch.Tensor):
            return tuple(self.values[5].tolist())
        return None


@dataclass(frozen=True)
class WeightPatchSet:
    """All changes of a model's weights. Equal names must always stand for equal patches; `""` stands for none.

    `side_branch` runs plain LoRAs beside the weights: they cost a little each step, and their strength changes for
    nothing.
    """

    name: str = ""
    patches: tuple[WeightPatch, ...] = ()
    side_branch: bool = False

    @property
    def strengths(self) -> list[float]:
        """The strengths in the order in which `pack` sends the patches."""
        return [patch.strength for group in by_weight(self.patches).values() for patch in group]

    def differs_in_strength_alone(self, other: "WeightPatchSet") -> bool:
        """Whether both are side branches of the very same tensors.

        By identity, which is safe because `other` still holds its tensors.
        """
        return (
            self.side_branch
            and other.side_branch
            and len(self.patches) == len(other.patches)
            and all(_same_but_strength(a, b) for a, b in zip(self.patches, other.patches, strict=True))
        )


PRISTINE = WeightPatchSet()


@dataclass(frozen=True)
class PatchBatch:
    """Patches that fit one message: every patch of each weight it names."""

    records: list[dict[str, Any]]
    tensors: dict[str, torch.Tensor]


def by_weight(patches: Iterable[WeightPatch]) -> dict[str, list[WeightPatch]]:
    """Patches by the weight they change, in order."""
    by_key: dict[str, list[WeightPatch]] = {}
    for patch in patches:
        by_key.setdefault(patch.key, []).append(patch)
    return by_key


def pack(patches: Iterable[WeightPatch]) -> Iterator[PatchBatch]:
    """Group patches by weight and fill messages with them. The order of a weight's patches is kept."""
    batch = PatchBatch([], {})
    for key, group in by_weight(patches).items():
        num_tensors = sum(isinstance(value, torch.Tensor) for patch in group for value in patch.values)
        if num_tensors > MAX_TENSORS or len(group) > MAX_RECORDS:
            raise ValueError(f"{key} has {len(group)} patches, more than {MAX_RECORDS}; stack fewer LoRAs")
        full = len(batch.tensors) + num_tensors > MAX_TENSORS or len(batch.records) + len(group) > MAX_RECORDS
        if full or sum(tensor.nbytes for tensor in batch.tensors.values()) >= ENOUGH_BYTES:
            yield batch
            batch = PatchBatch([], {})
        for patch in group:
            _append(batch, patch)
    if batch.records:
        yield batch


def unpack(records: Sequence[Mapping[str, Any]], tensors: Mapping[str, torch.Tensor]) -> dict[str, list[WeightPatch]]:
    """The inverse of `pack` for one batch: patches by weight."""
    patches = []
    for record in records:
        values = tuple(tensors[value] if isinstance(value, str) else value for value in record["values"])
        offset = None if record["offset"] is None else tuple(record["offset"])
        patches.append(WeightPatch(**{**record, "values": values, "offset": offset}))
    return by_weight(patches)


def _same_but_strength(a: WeightPatch, b: WeightPatch) -> bool:
    if (a.key, a.kind, a.strength_model, a.offset, a.swap) != (b.key, b.kind, b.strength_model, b.offset, b.swap):
        return False
    return len(a.values) == len(b.values) and all(
        x is y if isinstance(x, torch.Tensor) or isinstance(y, torch.Tensor) else x == y
        for x, y in zip(a.values, b.values, strict=True)
    )


def _append(batch: PatchBatch, patch: WeightPatch) -> None:
    values: list[str | float | None] = []
    for value in patch.values:
        if isinstance(value, torch.Tensor):
            name = f"patch.{len(batch.tensors)}"
            batch.tensors[name] = value
            values.append(name)
        else:
            values.append(value)
    batch.records.append(
        {
            "key": patch.key,
            "kind": patch.kind,
            "strength": patch.strength,
            "values": values,
            "strength_model": patch.strength_model,
            "offset": patch.offset,
            "swap": patch.swap,
        }
    )
