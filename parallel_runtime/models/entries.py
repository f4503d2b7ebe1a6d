"""Functions that run before and after a block, by whichever method its model calls it: `forward`, or others instead."""

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from torch import nn

Around = Callable[[], object]


def hook_entries(
    block: nn.Module, methods: Iterable[str], *, before: Around | None = None, after: Around | None = None
) -> None:
    """Have `before` and `after` called around each of a block's methods, `after` also where it raises.

    Of `forward` they are torch's hooks, `before` the first of them.
    """
    for method in methods:
        if method != "forward":
            setattr(block, method, _around(getattr(block, method), before, after))
            continue
        if before is not None:
            block.register_forward_pre_hook(lambda *_: _call(before), prepend=True)
        if after is not None:
            block.register_forward_hook(lambda *_: _call(after), always_call=True)


def _call(function: Around | None) -> None:
    """Without what it returns, which torch would take for new arguments or outputs."""
    if function is not None:
        function()


def _around(inner: Callable[..., Any], before: Around | None, after: Around | None) -> Callable[..., Any]:
    @wraps(inner)
    def method(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        _call(before)
        try:
            return inner(*args, **kwargs)
        finally:
            _call(after)

    return method
