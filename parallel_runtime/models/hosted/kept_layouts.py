"""Layouts that a class of ComfyUI's makes of a call's sizes, kept in the rank from one step to the next.

In ComfyUI's process MiniMax H3's packed layout is made once a run. It does not travel, and the class would make it anew
in each step, on the host, while the device has nothing to do, and bring it to the device. Kept is what depends on sizes
alone: that is tried, by making it of tensors that have no values. Owns which layouts these are and their books.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch

# The class of a layout by the module of ComfyUI's that makes it.
LAYOUTS = {"comfy.ldm.minimax.model": "PackedLayout"}
MOST = 8  # both prompts of a few sizes; the oldest goes first
# What torch and a class raise that look for values where there are none.
NEEDS_VALUES = (RuntimeError, NotImplementedError, TypeError, ValueError)


class KeptLayouts:
    """Stands for the class of a layout; tensors of those that it keeps lie on `device`."""

    def __init__(self, kind: Callable[..., Any], device: torch.device) -> None:
        self.kind, self.device = kind, device
        self._kept: dict[object, Any] = {}

    def __call__(self, *args: object, **kwargs: object) -> Any:  # noqa: ANN401
        """A layout, not to be written to: the one of an equal call, or a new one."""
        key = _key((args, kwargs))
        if key not in self._kept:
            try:
                self.kind(*_without_values(args), **_without_values(kwargs))
            except NEEDS_VALUES:
                return self.kind(*args, **kwargs)
            self._kept[key] = self._here(self.kind(*args, **kwargs))
            if len(self._kept) > MOST:
                del self._kept[next(iter(self._kept))]
        return self._kept[key]

    def _here(self, layout: Any) -> Any:  # noqa: ANN401
        for name, value in vars(layout).items():
            if isinstance(value, torch.Tensor):
                setattr(layout, name, value.to(self.device))
        return layout


def keep_layouts(kind: type, device: torch.device) -> None:
    """Have a class keep its layouts in this process; nothing for one that makes none."""
    module, name = sys.modules[kind.__module__], LAYOUTS.get(kind.__module__, "")
    layout = getattr(module, name, None) if name else None
    if layout is not None and not isinstance(layout, KeptLayouts):
        setattr(module, name, KeptLayouts(layout, device))


def _key(value: object) -> object:
    """What a layout depends on: of tensors the shape and the type, of everything else the value."""
    if isinstance(value, torch.Tensor):
        return (torch.Tensor, tuple(value.shape), value.dtype)
    if isinstance(value, dict):
        return (dict, *((name, _key(each)) for name, each in sorted(value.items())))
    if isinstance(value, list | tuple):
        return (type(value), *map(_key, value))
    return (type(value), value)


def _without_values(value: Any) -> Any:  # noqa: ANN401
    """The same with tensors of the meta device."""
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    if isinstance(value, dict):
        return {name: _without_values(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_without_values, value))
    return value
