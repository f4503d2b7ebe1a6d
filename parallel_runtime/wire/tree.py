"""The call of any model as plain values: a tree of lists, dicts and constants, its tensors by number.

Owns the form, which JSON carries, and what may be in it. Does not own how tensors travel (arena and channel), nor what
a model does with them. Nothing is built on the other side but what the tags below name.

A constant is itself, a float that JSON has no word for and a tensor or container an object of one key:
``{"t": number}``, ``{"f": "nan"}``, ``{"l": [...]}`` a list, ``{"u": [...]}`` a tuple, ``{"d": {...}}`` a dict.
"""

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from .protocol import DTYPE_BYTES, MAX_DIMS, ProtocolError

Tree: TypeAlias = "None | bool | int | float | str | dict[str, object]"
DEPTH = 32  # deeper is a mistake, or meant to exhaust us


def to_tree(value: object, path: str = "call") -> tuple[Tree, list[torch.Tensor]]:
    """The tree of a value, and its tensors; one that stands in several places is there once.

    Raises `ValueError` for what cannot travel, naming where it stands in the call.
    """
    writer = _Writer()
    return writer.write(value, path, 0), writer.tensors


class _Writer:
    """What a value's tree is made with: its tensors so far, and their numbers by identity.

    All of them are alive in the list, so no id can have been used twice.
    """

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._numbers: dict[int, int] = {}

    def write(self, value: object, path: str, depth: int) -> Tree:
        if depth > DEPTH:
            raise ValueError(f"{path} is nested deeper than {DEPTH}, which cannot be sent to the workers")
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"f": repr(value)}
        if isinstance(value, torch.Tensor):
            return {"t": self._number(value, path)}
        if type(value) in (list, tuple, torch.Size):
            items = [self.write(each, f"{path}[{index}]", depth + 1) for index, each in enumerate(_items(value))]
            return {"l" if isinstance(value, list) else "u": items}
        if isinstance(value, dict) and type(value) is dict:
            return {"d": {_key(key, path): self.write(each, f"{path}.{key}", depth + 1) for key, each in value.items()}}
        raise ValueError(
            f"{path} is a {type(value).__name__}, which cannot be sent to the workers: only tensors and plain values "
            "can; remove the node that adds it, or use the stock loader for this graph"
        )

    def _number(self, tensor: torch.Tensor, path: str) -> int:
        if id(tensor) not in self._numbers:
            _check_tensor(tensor, path)
            self._numbers[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return self._numbers[id(tensor)]


def from_tree(tree: object, tensors: Sequence[torch.Tensor], *, path: str = "call") -> object:
    """The value of a tree. Raises `ProtocolError` for a tag, a number or a form that `to_tree` does not write."""
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    if not isinstance(tree, dict) or len(tree) != 1:
        raise ProtocolError(f"{path} is {str(tree)[:80]!r}, no value of a tree")
    ((tag, inner),) = tree.items()
    read = _READERS.get(tag)
    if read is None:
        raise ProtocolError(f"{path} has the tag {str(tag)[:80]!r}; it is one of {', '.join(_READERS)}")
    return read(inner, tensors, path)


def _check_tensor(tensor: torch.Tensor, path: str) -> None:
    name = str(tensor.dtype).removeprefix("torch.")
    if tensor.is_meta:
        raise ValueError(
            f"{path} is computed from the model's weights, which are in the workers; remove the node that adds it, or "
            "use the stock loader for this graph"
        )
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
        raise ValueError(f"{path} is a {type(tensor).__name__}, which cannot be sent to the workers; use plain tensors")
    if name not in DTYPE_BYTES or tensor.ndim > MAX_DIMS:
        raise ValueError(
            f"{path} is a tensor of {name} with {tensor.ndim} dims, which cannot be sent to the workers; they take at "
            f"most {MAX_DIMS} dims of {', '.join(DTYPE_BYTES)}"
        )


def _key(key: object, path: str) -> str:
    if not isinstance(key, str):
        raise ValueError(f"{path} has the key {key!r}, not a text, which cannot be sent to the workers")
    return key


def _items(value: object) -> Sequence[object]:
    return value if isinstance(value, list | tuple) else ()


def _tensor(inner: object, tensors: Sequence[torch.Tensor], path: str) -> torch.Tensor:
    if isinstance(inner, bool) or not isinstance(inner, int) or not 0 <= inner < len(tensors):
        raise ProtocolError(f"{path} is tensor {str(inner)[:80]!r} of {len(tensors)}")
    return tensors[inner]


def _float(inner: object, tensors: Sequence[torch.Tensor], path: str) -> float:
    if inner not in ("nan", "inf", "-inf"):
        raise ProtocolError(f"{path} is the number {str(inner)[:80]!r}; it is one of nan, inf, -inf")
    return float(str(inner))


def _list(inner: object, tensors: Sequence[torch.Tensor], path: str) -> list[object]:
    if not isinstance(inner, list):
        raise ProtocolError(f"{path} is {str(inner)[:80]!r}, not a list")
    return [from_tree(each, tensors, path=f"{path}[{index}]") for index, each in enumerate(inner)]


def _tuple(inner: object, tensors: Sequence[torch.Tensor], path: str) -> tuple[object, ...]:
    return tuple(_list(inner, tensors, path))


def _dict(inner: object, tensors: Sequence[torch.Tensor], path: str) -> dict[str, object]:
    if not isinstance(inner, dict):
        raise ProtocolError(f"{path} is {str(inner)[:80]!r}, not an object")
    return {key: from_tree(each, tensors, path=f"{path}.{key}") for key, each in inner.items()}


_READERS: dict[str, Callable[[object, Sequence[torch.Tensor], str], object]] = {
    "t": _tensor,
    "f": _float,
    "l": _list,
    "u": _tuple,
    "d": _dict,
}
