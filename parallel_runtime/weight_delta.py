"""A change of one weight as it travels from where it is made to the ranks: plain values and named tensors.

Owns the record and its form on the wire. What a change does to a weight is `models/hosted/deltas.py`'s.
"""

import hashlib
import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from .daemon_futures import in_daemons

Value = torch.Tensor | float | str | None  # a text is a hash (`applied`)
# Kinds that only ComfyUI's own functions merge: a LoRA with a core or another shape, a difference of another shape.
# And `hook_weight`: no change, but a weight of a module that runs between the blocks (models/hosted/block_hooks.py).
HOOK_WEIGHT = "hook_weight"
HOSTED_KINDS = ("lora_core", "padded_diff", HOOK_WEIGHT)
KINDS = ("diff", "set", "lora", "loha", "lokr", "glora", "oft", "boft", *HOSTED_KINDS)

# What one message may carry (wire/protocol.py), 1 KiB left for its other fields; a weight whose deltas need more is
# refused. And from how many bytes of tensors on the next message begins.
MAX_TENSORS = 1024
MAX_TEXT_BYTES = 95 << 10
ENOUGH_BYTES = 1 << 28
HASH_THREADS = 8
LONGEST_NAME = f"delta.{MAX_TENSORS - 1}"


@dataclass(frozen=True, kw_only=True)
class WeightDelta:
    """One change of one weight. `values` are the kind's own, in the order of ComfyUI's `weight_adapter`.

    `key` is the weight's canonical name. `offset` (dim, start, length) narrows the weight to what the delta is for;
    `swap` exchanges the halves of the change, for deltas made for a layout with scale before shift;
    `strength_model` multiplies the weight first. `where_used`: merged as ComfyUI does it where a layer is used, with
    dynamic VRAM, which rounds otherwise than where a model is loaded.
    """

    key: str
    kind: str
    strength: float
    values: tuple[Value, ...]
    strength_model: float = 1.0
    offset: tuple[int, int, int] | None = None
    swap: bool = False
    where_used: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"{self.key}: a patch of kind {self.kind!r} is unknown; use {', '.join(KINDS)}")
        for name, number in (("strength", self.strength), ("strength_model", self.strength_model)):
            if not math.isfinite(number):
                raise ValueError(f"{self.key}: a patch has {name}={number}; use a finite number, for example 1")
        if broken := [each for each in self.values if isinstance(each, float) and not math.isfinite(each)]:
            raise ValueError(f"{self.key}: a patch has an alpha of {broken[0]}; its file is damaged, use another one")

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

    @property
    def changes_nothing(self) -> bool:
        """Whether it is of strength 0, as where a LoRA is for the text encoder alone."""
        kinds = ("set", "padded_diff", HOOK_WEIGHT)
        return not self.strength and self.strength_model == 1.0 and self.new_shape is None and self.kind not in kinds


def misfit(name: str, deltas: Sequence[WeightDelta], shape: list[int]) -> ValueError:
    """What to say of deltas that are none of a weight of this shape."""
    given = []
    for delta in deltas:
        shapes = [list(each.shape) for each in delta.values if isinstance(each, torch.Tensor)]
        given.append(f"a {delta.kind} patch of shapes {shapes}")
    fit = "does not fit" if len(given) == 1 else "do not fit"
    return ValueError(f"{', '.join(given)} {fit} {name}, a weight of {shape}; use one made for this model")


@dataclass(frozen=True)
class WeightDeltas:
    """All changes of a model's weights. Equal names must always stand for equal deltas; `""` stands for none.

    `side_branch` runs plain LoRAs as side branches: they cost a little each step, and another strength sends no
    tensor.
    """

    name: str = ""
    deltas: tuple[WeightDelta, ...] = ()
    side_branch: bool = False

    @property
    def strengths(self) -> list[float]:
        """The strengths in the order in which `pack` sends the deltas."""
        return [delta.strength for group in by_weight(self.deltas).values() for delta in group]

    @property
    def strengths_fit(self) -> bool:
        """Whether one message carries the strengths alone."""
        return len(_TO_JSON.encode(self.strengths)) <= MAX_TEXT_BYTES

    def applied(self, check: Callable[[], None] = lambda: None) -> "WeightDeltas":
        """What is known of them once weights have them: of each tensor a hash. The file that it is mapped from may be
        written over, and then it has other numbers than the weights.

        A LoRA's gigabytes take seconds: `check` is called between tensors, and what it raises ends this.
        """
        tensors = [value for delta in self.deltas for value in delta.values if isinstance(value, torch.Tensor)]
        hashes = iter(_hashes(tensors, check))
        known = []
        for delta in self.deltas:
            values = (next(hashes) if isinstance(value, torch.Tensor) else value for value in delta.values)
            known.append(replace(delta, values=tuple(values)))
        return replace(self, deltas=tuple(known))

    def same_as(self, other: "WeightDeltas") -> bool:
        """Whether weights that have `other` have these too, where both are `applied`: ComfyUI gives equal changes
        another name each time a node is executed."""
        return (self.side_branch, self.deltas) == (other.side_branch, other.deltas)

    def differs_in_strength_alone(self, other: "WeightDeltas") -> bool:
        """Whether both, which are `applied`, are side branches of equal tensors."""
        alike, its = ([replace(each, strength=1.0) for each in deltas.deltas] for deltas in (self, other))
        return self.side_branch and other.side_branch and alike == its


PRISTINE = WeightDeltas()


@dataclass(frozen=True)
class DeltaBatch:
    """Deltas that fit one message: every delta of each weight it names."""

    records: list[dict[str, Any]]
    tensors: dict[str, torch.Tensor]


def by_weight(deltas: Iterable[WeightDelta]) -> dict[str, list[WeightDelta]]:
    """Deltas by the weight they change, in order."""
    by_key: dict[str, list[WeightDelta]] = {}
    for delta in deltas:
        by_key.setdefault(delta.key, []).append(delta)
    return by_key


def pack(deltas: Iterable[WeightDelta]) -> Iterator[DeltaBatch]:
    """Group deltas by weight and fill messages with them. The order of a weight's deltas is kept.

    Raises `ValueError` for a weight whose deltas do not fit one message.
    """
    batch, text_bytes = DeltaBatch([], {}), 0
    for key, group in by_weight(deltas).items():
        num_tensors = sum(isinstance(value, torch.Tensor) for delta in group for value in delta.values)
        more_bytes = sum(len(_TO_JSON.encode(_record(delta, itertools.repeat(LONGEST_NAME)))) + 1 for delta in group)
        for number, limit, what in (
            (num_tensors, MAX_TENSORS, "tensors"),
            (more_bytes, MAX_TEXT_BYTES, "bytes of text"),
        ):
            if number > limit:
                raise ValueError(
                    f"{key} has {len(group)} patches of {number} {what}, more than {limit}; stack fewer LoRAs"
                )
        full = len(batch.tensors) + num_tensors > MAX_TENSORS or text_bytes + more_bytes > MAX_TEXT_BYTES
        if full or sum(tensor.nbytes for tensor in batch.tensors.values()) >= ENOUGH_BYTES:
            yield batch
            batch, text_bytes = DeltaBatch([], {}), 0
        text_bytes += more_bytes
        for delta in group:
            tensors = [value for value in delta.values if isinstance(value, torch.Tensor)]
            names = [f"delta.{len(batch.tensors) + index}" for index in range(len(tensors))]
            batch.records.append(_record(delta, iter(names)))
            batch.tensors.update(zip(names, tensors, strict=True))
    if batch.records:
        yield batch


def unpack(records: Sequence[Mapping[str, Any]], tensors: Mapping[str, torch.Tensor]) -> dict[str, list[WeightDelta]]:
    """The inverse of `pack` for one batch: deltas by weight."""
    deltas = []
    for record in records:
        values = tuple(tensors[value] if isinstance(value, str) else value for value in record["values"])
        offset = None if record["offset"] is None else tuple(record["offset"])
        deltas.append(WeightDelta(**{**record, "values": values, "offset": offset}))
    return by_weight(deltas)


def _hashes(tensors: Iterable[torch.Tensor], check: Callable[[], None]) -> list[str]:
    """The hash of each, a few at once: hashlib lets other threads run meanwhile."""
    works = [partial(_hash, tensor) for tensor in tensors]
    futures = in_daemons(works, at_once=min(HASH_THREADS, os.cpu_count() or 1))
    hashes = []
    try:
        for future in futures:
            check()
            hashes.append(future.result())
    finally:
        for future in futures:
            future.cancel()
    return hashes


def _hash(tensor: torch.Tensor) -> str:
    """Its dtype, shape and bytes in few."""
    told = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
    told.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return told.hexdigest()


def _record(delta: WeightDelta, names: Iterator[str]) -> dict[str, Any]:
    """A delta as a message has it, its tensors by these names."""
    return {
        "key": delta.key,
        "kind": delta.kind,
        "strength": delta.strength,
        "values": [next(names) if isinstance(value, torch.Tensor) else value for value in delta.values],
        "strength_model": delta.strength_model,
        "offset": delta.offset,
        "swap": delta.swap,
        "where_used": delta.where_used,
    }


_TO_JSON = json.JSONEncoder(separators=(",", ":"))  # as wire/protocol.py writes it
