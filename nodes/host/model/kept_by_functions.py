"""A function that keeps objects, as the same function that keeps others in their place.

What it is a method of, a partial's arguments, the variables around it and the defaults of its arguments are looked at,
and functions among those in the same way. What an object has as its attributes is not. Owns that alone.
"""

from collections.abc import Mapping
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

from ..contract.writers import around


def keeping(others: Mapping[int, object], value: Any) -> Any:  # noqa: ANN401  of any kind
    """What `value` is with the `others` in the place of those objects whose `id` they are named by; where it keeps none
    of them, and where it is no function, it is `value` itself."""
    return _Keeping(others).of(value)


class _Keeping:
    """One function and all that it is made of, each made anew once: functions may be variables around one another."""

    def __init__(self, others: Mapping[int, object]) -> None:
        self._others = others
        self._made = dict(others)  # by the id of what each stands for

    def of(self, value: Any) -> Any:  # noqa: ANN401  of any kind
        if id(value) in self._made:
            return self._made[id(value)]
        if not self._reaches(value):
            return value
        if isinstance(value, MethodType):
            return MethodType(self.of(value.__func__), self.of(value.__self__))
        if isinstance(value, partial):
            named = {name: self.of(each) for name, each in value.keywords.items()}
            return partial(self.of(value.func), *map(self.of, value.args), **named)
        return self._function(value)

    def _reaches(self, value: object) -> bool:
        """Whether one of the others is in it, however far."""
        due, seen = [value], dict[int, object]()
        while due:
            each = due.pop()
            if id(each) in self._others:
                return True
            if id(each) not in seen:
                seen[id(each)] = each
                due += _parts(each)
        return False

    def _function(self, value: FunctionType) -> FunctionType:
        """A cell whose object stays is shared with the function as it was: it may be written to."""
        variables = around(value)
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        own = {name: CellType() for name, each in variables.items() if self._reaches(each)}
        closure = tuple(own.get(name, cell) for name, cell in cells)
        made = FunctionType(value.__code__, value.__globals__, value.__name__, None, closure or None)
        self._made[id(value)] = made  # before its cells have anything: it may be a variable around itself
        for name, cell in own.items():
            cell.cell_contents = self.of(variables[name])
        made.__defaults__ = None if value.__defaults__ is None else tuple(map(self.of, value.__defaults__))
        named = value.__kwdefaults__
        made.__kwdefaults__ = None if named is None else {name: self.of(each) for name, each in named.items()}
        made.__qualname__, made.__module__, made.__doc__ = value.__qualname__, value.__module__, value.__doc__
        made.__annotations__ = value.__annotations__
        vars(made).update(vars(value))
        return made


def _parts(value: Any) -> list[object]:  # noqa: ANN401  of any kind
    """What a function, a method or a partial keeps."""
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, FunctionType):
        return [*around(value).values(), *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    return []
