"""Tiny models of ComfyUI's own classes with random weights; cases by name.

Gates and norms are about 1, so that what attention does wrong shows in the output.
Does not own the cases (cases_*.py). Only `build` imports comfy, and only the process that runs the ranks calls it. A
case of what newer ComfyUIs alone have is there where the ComfyUI under test has it.
"""

import copy
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from host.fetch import comfyui_says
from host.outcomes import StockFailsError

Case = tuple[nn.Module, dict[str, Any]]
CASES: dict[str, Callable[[], Case]] = {}
LACKING: set[str] = set()  # cases of what this ComfyUI has not


def case(name: str, *, of: tuple[str, str] | None = None) -> Callable[[Callable[[], Case]], Callable[[], Case]]:
    """Add a case. `of`: a module of ComfyUI and a text of its file; without them in this ComfyUI there is no case."""

    def add(make: Callable[[], Case]) -> Callable[[], Case]:
        if of is None or comfyui_says(*of):
            CASES[name] = make
        else:
            LACKING.add(name)
        return make

    return add


def build(path: str, **config: Any) -> nn.Module:
    """A class of ComfyUI by its dotted path, with random weights.

    Raises StockFailsError where this ComfyUI does not have the module.
    """
    import comfy.ops

    module, name = path.rsplit(".", 1)
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise StockFailsError(f"this ComfyUI has no {module}") from error
    model = getattr(found, name)(**config, dtype=torch.float32, device="cpu", operations=comfy.ops.manual_cast)
    numbers = torch.Generator().manual_seed(7)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        fill(name, tensor.data, numbers, parameter=isinstance(tensor, nn.Parameter))
    return model.eval().requires_grad_(False)


def takes(path: str, argument: str) -> bool:
    """Whether a class of ComfyUI's, or one that it is made of, has an argument of that name: newer ones have more."""
    module, _, name = path.rpartition(".")
    kinds = getattr(importlib.import_module(module), name).__mro__
    return any(argument in inspect.signature(kind.__init__).parameters for kind in kinds)


def fill(name: str, tensor: Tensor, numbers: torch.Generator, *, parameter: bool) -> None:
    """Random numbers of a size that keeps activations near 1. Buffers keep theirs, but for a table that files hold."""
    if not parameter:
        if name == "pos_embed":
            tensor.normal_(std=0.1, generator=numbers)
    elif tensor.ndim == 2 and "norm" not in name and "table" not in name:
        tensor.normal_(std=0.5 / tensor.shape[-1] ** 0.5, generator=numbers)
    elif tensor.ndim > 2:
        tensor.normal_(std=0.1, generator=numbers)
    else:
        is_scale = name.endswith("weight") or "scale" in name
        tensor.normal_(mean=1.0 if is_scale else 0.0, std=0.1, generator=numbers)


def noise(*shape: int) -> Tensor:
    """The same numbers for the same shape."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def text_mask(batch: int, hidden: slice = slice(6, None)) -> Tensor:
    """Of 9 tokens of text, of which those of the last row that are `hidden` are padding."""
    there = torch.ones(batch, 9, dtype=torch.long)
    there[-1, hidden] = 0
    return there


def at(*values: float) -> Tensor:
    """A timestep for each image."""
    return torch.tensor(values)


def call(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """One call, its output flat."""
    given = copy.deepcopy(inputs)
    if hasattr(model, "clear_kv_cache"):  # as the worker before each call
        model.clear_kv_cache()
    out = model(**given)
    return torch.cat([each.flatten() for each in out]) if isinstance(out, (list, tuple)) else out.flatten()


def difference(got: Tensor, want: Tensor) -> float:
    """Relative error; infinite for what is not finite or has another shape."""
    if got.shape != want.shape or not got.isfinite().all():
        return float("inf")
    return float((got - want).norm() / want.norm())
