"""One call of a model as it travels to the workers. Owns its fields; the pool takes any, ComfyUI's are made by
models/hosted/calls.py."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

OUT = "out"  # the name of a call's result among its tensors


class CallPlace(NamedTuple):
    """By what ranks find what the call before left: the sampling run, and what tells the call from others of a step."""

    run: str
    key: str


@dataclass(frozen=True, kw_only=True)
class ModelCall:
    """One call of a model: `tensors` on any device, the shape and dtype of its result, and options of the engine.

    The first dim of the result is the batch: its rows may be run by different batch groups. A call of ComfyUI's has a
    result of (B, numbers), whose rows are several outputs side by side, of these `shapes`. A call without `place` finds
    nothing of an earlier one and leaves nothing.
    """

    tensors: Mapping[str, torch.Tensor]
    out_shape: tuple[int, ...]
    out_dtype: torch.dtype = torch.float32
    options: Mapping[str, Any] = field(default_factory=dict)
    shapes: tuple[tuple[int, ...], ...] = ()
    place: CallPlace | None = None

    def __post_init__(self) -> None:
        if OUT in self.tensors:
            raise ValueError(f"a tensor is named {OUT!r}, which is the result's name; rename it")
        if any(size < 0 for size in self.out_shape):
            raise ValueError(f"a result of shape {self.out_shape}; no size may be below 0")

    @property
    def rows(self) -> int:
        """The batch; 1 for a result without dims."""
        return self.out_shape[0] if self.out_shape else 1

    def of_first_row(self) -> "ModelCall":
        """The call with its first row in place of all others, which is wrong on purpose: a negative control."""
        tensors = dict(self.tensors)
        for name in (f"t{number}" for number in self.options["batched"]):
            first = tensors[name][: len(tensors[name]) // self.rows]
            tensors[name] = first.repeat(self.rows, *(1 for _ in first.shape[1:]))
        return replace(self, tensors=tensors)

    def outputs(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The outputs that a result (B, numbers) holds side by side."""
        numbers = [torch.Size(shape).numel() // self.rows for shape in self.shapes]
        return [part.reshape(shape) for part, shape in zip(flat.split(numbers, 1), self.shapes, strict=True)]
