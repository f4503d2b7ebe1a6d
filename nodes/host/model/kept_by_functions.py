"""A function that keeps objects, as the same function that keeps others in their place.

What it is a method of, a partial's arguments, the variables around it and the defaults of its arguments are looked at,
and functions among those in the same way. What an object has as its attributes is not. Owns that alone.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

from ..contract.writers import around


def keeping(others: Mapping[int, object], value: Any) -> Any:  # noqa: ANN401  of any kind
    """What `value` is with the `others` in the place of those objects whose `id` they are named by; where it keeps none
    of them, and where it is no function, it is `value` itself."""
    if id(value) in others:
        return others[id(value)]
    swap = partial(keeping, {**others, id(value): value})  # the last: a function may be a variable around itself
    if isinstance(value, MethodType):
        parts = value.__func__, value.__self__
        return value if _same(parts, new := tuple(map(swap, parts))) else MethodType(*new)
    if isinstance(value, partial):
        parts = value.func, *value.args, *value.keywords.values()
        function, *rest = new = tuple(map(swap, parts))
        named = dict(zip(value.keywords, rest[len(value.args) :], strict=True))
        return value if _same(parts, new) else partial(function, *rest[: len(value.args)], **named)
    return _function(value, swap) if isinstance(value, FunctionType) else value


def _function(value: FunctionType, swap: Callable[[Any], Any]) -> FunctionType:
    variables, defaults, named = around(value), value.__defaults__ or (), value.__kwdefaults__ or {}
    parts = (*variables.values(), *defaults, *named.values())
    new = tuple(map(swap, parts))
    if _same(parts, new):
        return value
    placed = dict(zip(variables, new, strict=False))
    cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
    # A cell whose object stays is shared with the function as it was: it may be written to.
    closure = tuple(
        cell if name not in placed or placed[name] is variables[name] else CellType(placed[name])
        for name, cell in cells
    )
    at = len(variables)
    found = FunctionType(
        value.__code__, value.__globals__, value.__name__, new[at : at + len(defaults)] or None, closure or None
    )
    found.__kwdefaults__ = dict(zip(named, new[at + len(defaults) :], strict=True)) or None
    found.__qualname__, found.__module__, found.__doc__ = value.__qualname__, value.__module__, value.__doc__
    vars(found).update(vars(value))
    return found


def _same(parts: tuple[object, ...], new: tuple[object, ...]) -> bool:
    return all(old is now for old, now in zip(parts, new, strict=True))
