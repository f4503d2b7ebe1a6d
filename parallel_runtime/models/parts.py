"""A weight as the plain tensors that it is made of: one, or several of a quantised one, which is of another class.

Owns the way from one to the others and back, by torch's own protocol for such classes. Knows no format and no model.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

Make = Callable[[Sequence[torch.Tensor]], torch.Tensor]


def plain_parts(weight: torch.Tensor) -> tuple[list[torch.Tensor], Make]:
    """The plain tensors of which a weight is made, and what makes it of others like them."""
    data = weight.data if type(weight) is torch.nn.Parameter else weight  # of a quantised one `data` copies the scales
    if not hasattr(data, "__tensor_flatten__"):
        return [data], lambda parts: parts[0]
    names, context = data.__tensor_flatten__()
    kind, shape, stride = type(data), data.shape, data.stride()

    def make(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        inner = dict(zip(names, parts, strict=True))
        made: torch.Tensor = kind.__tensor_unflatten__(inner, context, shape, stride)  # type: ignore[attr-defined]
        return made

    return [getattr(data, name) for name in names], make


def as_parameter(weight: torch.Tensor) -> torch.nn.Parameter:
    """The same tensor as a parameter. torch's constructor detaches it, and a quantised one then copies its scales."""
    if type(weight) in (torch.Tensor, torch.nn.Parameter):
        return torch.nn.Parameter(weight, requires_grad=False)
    cast(Any, weight)._is_param = True  # by which torch knows parameters of other classes
    return cast(torch.nn.Parameter, weight)
