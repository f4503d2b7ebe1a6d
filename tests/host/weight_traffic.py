"""Which kernels use a module's matrices in a call, and how many bytes of them they move, counted by a dispatch mode.

A copy of a matrix in another dtype is read once and written once, and read again by its product: what a device does
with memory, whatever its caches hold. Activations are not counted, nor biases and norms. Owns the counting alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parallel_runtime.models.parts import plain_parts


@dataclass(frozen=True)
class Use:
    """What a call did: kernels by name and the dtype that they had the matrix in; bytes moved and held."""

    kernels: Mapping[str, int]
    moved_bytes: int
    held_bytes: int
    numbers: int
    dtypes: Counter[str] = field(default_factory=Counter)  # of the matrices, held

    @property
    def bytes_a_weight(self) -> float:
        """Moved in the call, for each number of a matrix."""
        return self.moved_bytes / self.numbers


class WeightTraffic(TorchDispatchMode):
    """Counts while it is entered; `use` says what it found."""

    def __init__(self, matrices: Iterable[torch.Tensor], *, numbers: int) -> None:
        super().__init__()
        self._parts = [part for matrix in matrices for part in plain_parts(matrix)[0] if part.numel() > 1]
        self._known = {_address(part) for part in self._parts}
        self._alive: list[torch.Tensor] = []  # what was made of them: its address stays its own
        self._kernels: Counter[str] = Counter()
        self._moved, self._numbers = 0, numbers

    @property
    def use(self) -> Use:
        held = Counter(str(part.dtype).removeprefix("torch.") for part in self._parts)
        return Use(self._kernels, self._moved, sum(part.nbytes for part in self._parts), self._numbers, held)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a quantised tensor says what it does by kernels of plain ones, which come here
        out = func(*args, **(kwargs or {}))
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        matrices = [each for each in given if _address(each) in self._known]
        made = [each for each in tree_leaves(out) if isinstance(each, torch.Tensor)]
        changed = func._schema.is_mutable
        if not matrices or (not changed and all(_address(each) in self._known for each in made)):  # views
            return out
        others = [each for each in given if _address(each) not in self._known and each.numel() > 1]
        self._moved += sum(each.nbytes for each in matrices)
        self._kernels[f"{func} {' '.join(sorted({str(each.dtype)[6:] for each in matrices}))}"] += 1
        if not others or changed:
            self._moved += sum(each.nbytes for each in made)
            self._alive += made
            self._known |= {_address(each) for each in made}
        return out


def matrices_of(module: torch.nn.Module) -> tuple[list[torch.Tensor], int]:
    """The weights of all linear layers of a module, and how many numbers they have."""
    found, numbers = [], 0
    for layer in module.modules():
        if hasattr(layer, "in_features") and hasattr(layer, "out_features"):
            found.append(layer.weight)
            numbers += layer.in_features * layer.out_features
    return found, numbers


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
