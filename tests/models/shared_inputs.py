"""Which layers of a module are given the same tensor one after the other, and whether it is written to in between.

What ranks exchange once for such layers (models/hosted/scales.py) is of the tensor as the first of them had it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass
class Found:
    """Names of layers whose input was the last layer's too, and of those for whom it was another by then."""

    shared: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)


class Writes(TorchDispatchMode):
    """Remembers the storages that were written to since `since_then` was emptied."""

    def __init__(self) -> None:
        super().__init__()
        self.since_then: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As torch says."""
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Tensor):
                self.since_then.add(value.untyped_storage().data_ptr())
        for value in (kwargs or {}).values() if func._schema.is_mutable else ():
            if isinstance(value, Tensor):  # out=
                self.since_then.add(value.untyped_storage().data_ptr())
        return func(*args, **(kwargs or {}))


@contextmanager
def watched(model: torch.nn.Module) -> Iterator[Found]:
    """Around a call of the module."""
    found, writes = Found(), Writes()
    last: list[Any] = [None]

    def forward(name: str, inner: Any, given: Tensor, *more: Any, **named: Any) -> Any:
        if given is last[0]:
            found.shared.append(name)
            if given.untyped_storage().data_ptr() in writes.since_then:
                found.changed.append(name)
        else:
            last[0] = given
            writes.since_then.clear()
        return inner(given, *more, **named)

    layers = [(name, each) for name, each in model.named_modules() if isinstance(each, torch.nn.Linear)]
    for name, layer in layers:
        layer.forward = partial(forward, name, layer.forward)
    try:
        with writes:
            yield found
    finally:
        for _, layer in layers:
            vars(layer).pop("forward", None)
