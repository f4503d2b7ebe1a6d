"""Arguments and outputs of modules as trees: their leaves by address, and a tree with one leaf replaced.

An address is a tuple of indices and keys, () for a value that is a leaf itself.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

Address = tuple[Any, ...]


def leaves(value: Any, at: Address = ()) -> Iterator[tuple[Address, Any]]:  # noqa: ANN401
    """What a value of tuples, lists and dictionaries has at its ends, with addresses."""
    if isinstance(value, (tuple, list)):
        for number, each in enumerate(value):
            yield from leaves(each, (*at, number))
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from leaves(each, (*at, key))
    else:
        yield at, value


def tensors(value: Any) -> Iterator[tuple[Address, Tensor]]:  # noqa: ANN401
    """The leaves that are tensors."""
    for at, leaf in leaves(value):
        if isinstance(leaf, Tensor):
            yield at, leaf


def leaf_at(value: Any, at: Address) -> Any:  # noqa: ANN401
    """The leaf, or the branch, of an address."""
    for key in at:
        value = value[key]
    return value


def with_leaf(value: Any, at: Address, leaf: Any) -> Any:  # noqa: ANN401
    """The same tree with another leaf; what is not on the way to it is shared."""
    if not at:
        return leaf
    key, *rest = at
    changed = with_leaf(value[key], tuple(rest), leaf)
    if isinstance(value, dict):
        return {**value, key: changed}
    parts = list(value)
    parts[key] = changed
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


def copied(value: Any) -> Any:  # noqa: ANN401
    """The tree with tensors of its own, since modules write in place."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: copied(each) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        parts = [copied(each) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, Mapping) or value is None or callable(value):
        return value
    return copy.copy(value)


def nudged(tensor: Tensor, dim: int, index: int) -> Tensor:
    """The tensor with other values at one index of a dim."""
    other = tensor.clone()
    part = other.select(dim, index)
    if not part.numel():
        return other
    if tensor.dtype == torch.bool:
        part.logical_not_()
    elif tensor.is_floating_point() or tensor.is_complex():
        more = torch.linspace(0.5, 1.0, max(part.numel(), 1), device=part.device).view(part.shape).to(part.dtype)
        # the numbers of a mask that hide a token are so low that nothing is added to them
        part.copy_(torch.where(part + more == part, more, part + more))
    else:
        part.add_(1)
    return other


def moved(before: Tensor, after: Tensor, dim: int) -> tuple[int, ...] | None:
    """The indices of a dim at which two tensors differ; None for tensors of different shapes."""
    if before.shape != after.shape:
        return None
    if not before.numel():
        return ()
    same = (before == after) | ((before != before) & (after != after))  # NaN is NaN
    rows = (~same).movedim(dim, 0).reshape(before.shape[dim], -1).any(1)
    return tuple(rows.nonzero().flatten().tolist())
