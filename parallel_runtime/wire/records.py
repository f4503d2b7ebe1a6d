"""A dataclass as a message's JSON object, and back: what requests and replies have in common.

A field may be an int, a float, a str, a bool, another dataclass, a NamedTuple (a list in JSON), a tuple or a dict by
name of these, or one of them beside None. A field that has its default is left out. What comes is refused by the
field's name: one that is unknown, missing or of another type.

Each class is looked at once, when it is first asked for: a step waits for its replies, so a record may cost some
microseconds and no more. Owns the form of a record. Does not own which records there are (requests.py, replies.py) nor
the bytes of a message (protocol.py).
"""

import functools
import reprlib
import types
import typing
from collections.abc import Callable, Hashable
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeAlias, TypeVar

from .protocol import ProtocolError

Record = TypeVar("Record")
Reader: TypeAlias = Callable[[Any], Any]  # of JSON's value; raises _UnfitError
Writer: TypeAlias = Callable[[Any], Any]
MAX_NAME_CHARS = 40
MAX_NAMES = 8  # that one refusal says
OTHER_VERSION = "the parent and this rank are of different versions"


class _UnfitError(Exception):
    """A value that its field cannot have. `where` is the way to it, from the record that is read."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.where = ""

    def inside(self, step: str) -> "_UnfitError":
        """The same, one step further out."""
        self.where = step + self.where
        return self


def to_body(record: object) -> dict[str, Any]:
    """The record's fields as values that JSON can carry; `from_body` is the inverse."""
    body: dict[str, Any] = _record_writer(typing.cast(Hashable, type(record)))(record)
    return body


def from_body(kind: type[Record], body: object, name: str) -> Record:
    """The record of that kind that `body` holds; messages call it `name`.

    Raises ProtocolError for a field that is unknown, missing or of another type, and for what the record refuses.
    """
    try:
        record: Record = _record_reader(typing.cast(Hashable, kind))(body)
    except _UnfitError as error:
        raise ProtocolError(f"{name}{error.where}{error}") from error
    return record


@functools.cache
def _record_reader(kind: type) -> Reader:
    hints = typing.get_type_hints(kind)
    names = frozenset(field.name for field in fields(kind))
    defaults = {field.name: default for field in fields(kind) if (default := _default(field)) is not MISSING}
    required = names - defaults.keys()
    make = _unchecked if not hasattr(kind, "__post_init__") else _checked
    readers = {name: (hints[name], _reader(hints[name])) for name in names}

    def read(body: Any) -> Any:  # noqa: ANN401  JSON's value; one of `kind`
        if type(body) is not dict:
            raise _UnfitError(f" is {reprlib.repr(body)}, not an object")
        if not required <= body.keys() <= names:
            raise _UnfitError(_other_names(body.keys(), names, required))
        values = defaults.copy()
        for name, value in body.items():
            hint, reader = readers[name]
            if type(value) is not hint:  # so a plain value costs no call
                try:
                    value = reader(value)
                except _UnfitError as error:
                    raise error.inside(f".{name}") from None
            values[name] = value
        return make(kind, values)

    return read


def _unchecked(kind: type, values: dict[str, Any]) -> Any:  # noqa: ANN401  one of `kind`
    """A frozen dataclass that checks nothing, whose `__init__` would set field by field: 3 us of a step's reply."""
    record: Any = object.__new__(kind)
    record.__dict__.update(values)
    return record


def _checked(kind: type, values: dict[str, Any]) -> Any:  # noqa: ANN401  one of `kind`
    try:
        return kind(**values)
    except ValueError as error:
        raise _UnfitError(f": {error}") from error


def _default(field: Any) -> Any:  # noqa: ANN401  a dataclass's field; any value
    return field.default if field.default_factory is MISSING else field.default_factory()


def _other_names(found: typing.AbstractSet[str], names: frozenset[str], required: frozenset[str]) -> str:
    said = {"unknown": sorted(map(_quoted, found - names))[:MAX_NAMES], "missing": sorted(required - found)}
    return ": " + "; ".join([f"{word} {', '.join(those)}" for word, those in said.items() if those] + [OTHER_VERSION])


def _quoted(name: str) -> str:
    """A name as it came, quoted and shortened unless it could be a field's."""
    return name if name.isidentifier() and len(name) <= MAX_NAME_CHARS else reprlib.repr(name)


def _reader(hint: Any) -> Reader:  # noqa: ANN401  any type that a field may have
    """What turns JSON's value into one of the type, or refuses it."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        (inner,) = (_reader(each) for each in arguments if each is not types.NoneType)
        return lambda value: None if value is None else inner(value)
    if origin is tuple:
        return _run_reader(arguments[0]) if arguments[-1] is Ellipsis else _list_reader(arguments, tuple)
    if origin is dict:
        return _dict_reader(arguments[1])
    if hint is Any:
        return lambda value: value
    if is_dataclass(hint):
        return _record_reader(typing.cast(type, hint))
    if issubclass(hint, tuple):
        hints = typing.get_type_hints(hint)
        return _list_reader(tuple(hints.values()), hint._make, names=tuple(hints))
    return functools.partial(_plain, hint)


def _plain(kind: type, value: Any) -> Any:  # noqa: ANN401  JSON's value; one of `kind`
    """The value when it is of the type; an int is a float too, a bool is no number."""
    if type(value) is kind:
        return value
    if kind is float and type(value) is int and abs(value) < 1 << 1023:
        return float(value)
    raise _UnfitError(f" is {reprlib.repr(value)}, not of type {kind.__name__}")


def _run_reader(hint: Any) -> Reader:  # noqa: ANN401  any type that a field may have
    """Of any number of values of one type, a tuple."""
    read, only = _reader(hint), {hint}

    def read_all(value: Any) -> tuple[Any, ...]:  # noqa: ANN401  JSON's value
        items = _plain(list, value)
        if set(map(type, items)) <= only:
            return tuple(items)
        found = []
        for number, item in enumerate(items):
            try:
                found.append(read(item))
            except _UnfitError as error:
                raise error.inside(f"[{number}]") from None
        return tuple(found)

    return read_all


def _list_reader(hints: tuple[Any, ...], make: Callable[[Any], Any], *, names: tuple[str, ...] = ()) -> Reader:
    """Of one value of each type, a tuple or a NamedTuple, whose fields have names."""
    steps = [f".{name}" for name in names] or [f"[{number}]" for number in range(len(hints))]
    readers = list(zip(steps, map(_reader, hints), strict=True))

    def read_all(value: Any) -> Any:  # noqa: ANN401  JSON's value; what `make` makes
        items = _plain(list, value)
        if tuple(map(type, items)) == hints:
            return make(items)
        if len(items) != len(readers):
            raise _UnfitError(f" has {len(items)} values, not {len(readers)}")
        found = []
        for (step, read), item in zip(readers, items, strict=True):
            try:
                found.append(read(item))
            except _UnfitError as error:
                raise error.inside(step) from None
        return make(found)

    return read_all


def _dict_reader(hint: Any) -> Reader:  # noqa: ANN401  any type that a field may have
    """Of values of one type by name; JSON has the names as texts already."""
    read, only = _reader(hint), {hint}

    def read_all(value: Any) -> dict[str, Any]:  # noqa: ANN401  JSON's value
        items = _plain(dict, value)
        if set(map(type, items.values())) <= only:
            return items
        found = {}
        for name, item in items.items():
            try:
                found[name] = read(item)
            except _UnfitError as error:
                raise error.inside(f".{_quoted(name)}") from None
        return found

    return read_all


@functools.cache
def _record_writer(kind: type) -> Writer:
    hints = typing.get_type_hints(kind)
    parts = [(field.name, _default(field), _writer(hints[field.name])) for field in fields(kind)]

    def write(record: object) -> dict[str, Any]:
        body = {}
        for name, default, writer in parts:
            value = getattr(record, name)
            if value is not default:
                body[name] = value if writer is None else writer(value)
        return body

    return write


def _writer(hint: Any) -> Writer | None:  # noqa: ANN401  any type that a field may have
    """What turns a field's value into one that JSON can carry; None for a value that is one already."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if is_dataclass(hint):
        return _record_writer(typing.cast(type, hint))
    if origin in (typing.Union, types.UnionType):
        (inner,) = (_writer(each) for each in arguments if each is not types.NoneType)
        return None if inner is None else lambda value: None if value is None else inner(value)
    if origin is tuple and arguments[-1] is Ellipsis and (each := _writer(arguments[0])) is not None:
        return lambda value: [each(item) for item in value]
    return None
