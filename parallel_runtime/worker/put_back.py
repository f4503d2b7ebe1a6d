"""What calls leave behind on a model's modules is taken away again.

Owns where a class may keep something of a call: in attributes and buffers, in containers and objects within them, and
by writing into tensors. Does not own variables of a class, closures, nor weights, which may be larger than the memory.
"""

import operator
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MemberDescriptorType
from typing import Any

import torch
from torch import nn

CONTAINERS = (dict, list, set, deque)
Restore = Callable[[], None]


@contextmanager
def put_back(model: nn.Module) -> Iterator[None]:
    """Inside, calls may keep on the model's modules what they like; then these have again what they had.

    Ranks begin as one process did: what a class keeps of its first call, whole, would hide that ranks keep another.
    """
    restores = list(_restores(model))
    try:
        yield
    finally:
        with torch.no_grad():
            for restore in restores:
                restore()


def _restores(model: nn.Module) -> Iterator[Restore]:
    """What has all be again as it is now that is reached from the model's modules, through containers and through
    objects of the packages that the modules' classes are of."""
    packages = {_package(each) for each in model.modules()} - {"torch"}
    found: dict[int, Any] = {}
    left: list[Any] = [model]
    while left:
        each = left.pop()
        if id(each) in found or isinstance(each, nn.Parameter | type):
            continue
        found[id(each)] = each  # held, so that no other object has its id
        if isinstance(each, CONTAINERS):
            contents = _contents(each)
            left.extend(contents)
            yield partial(_refill, each, contents)
        elif isinstance(each, tuple):
            left.extend(each)
        elif type(each) is torch.Tensor:
            if not each.is_inference():
                yield partial(_rewrite, each, each._version, each.clone())
        elif isinstance(each, nn.Module) or _package(each) in packages:
            left.append(getattr(each, "__dict__", None))
            for slot in _slots(type(each)):
                value = getattr(each, slot.__name__, slot)
                left.append(value)
                yield partial(_set, each, slot, value)


def _contents(container: Any) -> list[Any]:  # noqa: ANN401  one of CONTAINERS
    """What is in a container, in its order; of a dictionary the keys, then the values."""
    return [*container, *container.values()] if isinstance(container, dict) else [*container]


def _refill(container: Any, contents: list[Any]) -> None:  # noqa: ANN401
    now = _contents(container)
    if len(now) == len(contents) and all(map(operator.is_, now, contents)):
        return  # it may be one that refuses changes
    container.clear()
    if isinstance(container, dict):
        half = len(contents) // 2
        container.update(zip(contents[:half], contents[half:], strict=True))
    else:
        container.extend(contents) if isinstance(container, list | deque) else container.update(contents)


def _rewrite(tensor: torch.Tensor, version: int, before: torch.Tensor) -> None:
    if tensor._version != version:  # else it may be of a file, which nothing can be written to
        tensor.copy_(before)


def _slots(kind: type) -> list[MemberDescriptorType]:
    """Attributes that instances have by `__slots__`."""
    return [each for base in kind.__mro__ for each in vars(base).values() if isinstance(each, MemberDescriptorType)]


def _set(each: Any, slot: MemberDescriptorType, value: Any) -> None:  # noqa: ANN401
    """`value`: the slot itself where it was empty."""
    if value is not slot:
        slot.__set__(each, value)
    elif hasattr(each, slot.__name__):
        slot.__delete__(each)


def _package(each: Any) -> str:  # noqa: ANN401
    return type(each).__module__.partition(".")[0]
