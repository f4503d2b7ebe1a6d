"""Functions that run before and after a block, by whichever method its model calls it: `forward`, or others instead.

And in place of it, and what says which of the modules inside it runs.
"""

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, Protocol

from torch import nn

Around = Callable[[], object]


def entries_of(block: nn.Module) -> tuple[str, ...]:
    """The methods by which an unknown model may call a block, by ComfyUI's names: `forward`, `forward_pose`."""
    return tuple(name for name in dir(type(block)) if name == "forward" or name.startswith("forward_"))


def hook_entries(
    block: nn.Module, methods: Iterable[str], *, before: Around | None = None, after: Around | None = None
) -> None:
    """Have `before` and `after` called around each of a block's methods, `after` also where it raises.

    Once, where one of the methods calls another. Of `forward` they are torch's hooks, `before` the first of them.
    """
    inside = [0]

    def enter(*_: object) -> None:
        inside[0] += 1
        if inside[0] == 1 and before is not None:
            before()

    def leave(*_: object) -> None:
        inside[0] -= 1
        if inside[0] == 0 and after is not None:
            after()

    for method in methods:
        if method == "forward":
            block.register_forward_pre_hook(enter, prepend=True)
            block.register_forward_hook(leave, always_call=True)
        else:
            setattr(block, method, _between(enter, getattr(block, method), leave))


def _between(enter: Around, inner: Callable[..., Any], leave: Around) -> Callable[..., Any]:
    @wraps(inner)
    def method(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        try:
            enter()
            return inner(*args, **kwargs)
        finally:
            leave()

    return method


class Named(Protocol):
    """What knows which module of a block runs."""

    site: str


class Entrance:
    """Stands for a block's forward; while `instead` is set, that is called in its place."""

    def __init__(self, block: nn.Module) -> None:
        self.inner: Callable[..., Any] = block.forward
        self.instead: Callable[..., Any] | None = None
        block.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        return (self.instead or self.inner)(*args, **kwargs)


def at_site(switch: Named, name: str, inner: Callable[..., Any], *first: object) -> Callable[..., Any]:
    """A module's method, `inner`, that has `switch.site` be this name while it runs."""

    def forward(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        around, switch.site = switch.site, name
        try:
            return inner(*first, *args, **kwargs)
        finally:
            switch.site = around

    return forward
