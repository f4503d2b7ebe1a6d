"""A module's code on tensors without values: what a function returns, by shape and dtype, and what a call takes.

Owns the kind of tensor that this is tried with. The meta device alone would not do: ComfyUI's code asks a tensor for
its device to autocast there, and torch has no autocast for the meta device; and a forward may read values of what it is
given, which has some here, with weights that have none.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.func import functional_call
from torch.utils._pytree import tree_map


class Valueless(torch.Tensor):
    """A tensor without values that says it is on the CPU. What is made of it is one, too; what is not has values."""

    meta: torch.Tensor

    @staticmethod
    def __new__(cls: type["Valueless"], meta: torch.Tensor) -> "Valueless":
        """Of the shape, strides and dtype of a tensor on the meta device."""
        made: Valueless = torch.Tensor._make_wrapper_subclass(
            cls, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=torch.device("cpu")
        )
        made.meta = meta
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub lacks it
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Have the meta device work out what comes of an operation."""
        given, named = tree_map(_on_meta, (tuple(args), dict(kwargs or {})))
        return tree_map(_without, func(*given, **named))


def take_values(module: torch.nn.Module) -> None:
    """Leave the module's weights nothing but the shapes and dtypes of what is computed with; buffers keep theirs."""
    for owner in module.modules():
        for name, weight in owner._parameters.items():
            if weight is not None:
                plain = torch.empty(weight.shape, dtype=weight.dtype, device="meta")  # also of a quantised one
                owner._parameters[name] = torch.nn.Parameter(Valueless(plain), requires_grad=False)


def has_values(module: torch.nn.Module) -> bool:
    """Whether a call of the module computes something."""
    return not any(weight.is_meta or isinstance(weight, Valueless) for weight in module.parameters())


class _Tried(torch.nn.Module):
    """A function of a module, in a form whose weights torch can exchange for the time of a call."""

    def __init__(self, module: torch.nn.Module, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.module, self.function = module, function

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ANN401
        return self.function(self.module, *args, **kwargs)


def without_values(
    module: torch.nn.Module,
    function: Callable[..., torch.Tensor],
    *args: Any,  # noqa: ANN401
    **kwargs: Any,  # noqa: ANN401
) -> torch.Tensor:
    """What `function` of the module and these arguments returns, without its values. The module stays as it is."""
    held = (*module.named_parameters(), *module.named_buffers())
    weights = {f"module.{name}": _without_values(each) for name, each in held}
    given, named = tree_map(_without_values, (args, kwargs))
    with torch.no_grad():
        result: torch.Tensor = functional_call(_Tried(module, function), weights, given, named)
    return result


def _on_meta(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, Valueless):
        return value.meta
    if isinstance(value, torch.device):
        return torch.device("meta")
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def _without(value: Any) -> Any:  # noqa: ANN401
    return Valueless(value) if isinstance(value, torch.Tensor) else value


def _without_values(value: Any) -> Any:  # noqa: ANN401
    return _without(_on_meta(value))
