"""What the parent asks of its ranks, one dataclass a kind of request, and their form as a message's JSON object.

Both ends import these, so neither can name a field that the other lacks. Owns the fields and the checks a rank makes
before it believes a body: unknown, missing and mistyped fields are refused by name. Does not own the bytes of a message
(protocol.py), where tensors lie (channel.py), nor what a rank does (rank/).
"""

import functools
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from typing import Any, TypeAlias

from ..checkpoint import ModelSpec
from ..plan import Layout, ParallelPlan
from ..program import Program
from .protocol import Op, ProtocolError

Options: TypeAlias = dict[str, Any]  # of one call of the model, as the engine takes them


@dataclass(frozen=True, kw_only=True)
class Load:
    """Have a model on ranks `first_rank` to `layout.ranks`; those before hold theirs already.

    `mesh` has the ranks that put sharded weights together. Ranks without room first free models in `eviction_order`.
    """

    model: int
    spec: ModelSpec
    layout: Layout
    first_rank: int
    mesh: int | None
    budget_bytes: int | None
    eviction_order: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Unload:
    """Free a model; nothing on a rank that does not hold it."""

    model: int


@dataclass(frozen=True, kw_only=True)
class ChangeWeights:
    """One message of a model's weight patches, as `patch.pack` writes them; the last takes back what none has named.

    With `side_branch`, plain LoRAs run beside the weights.
    """

    model: int
    records: tuple[Options, ...]
    side_branch: bool
    first: bool
    last: bool


@dataclass(frozen=True, kw_only=True)
class SetStrengths:
    """Other strengths for the LoRAs that run beside a model's weights, in the order in which they came."""

    model: int
    strengths: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class MakeMesh:
    """Make the process groups of a plan."""

    mesh: int
    plan: ParallelPlan


@dataclass(frozen=True, kw_only=True)
class CachedKeys:
    """Which keys and values of a call before it a pipeline's call may use: see `pool/stale.py`."""

    epoch: int
    slot: int | None
    warm: bool


@dataclass(frozen=True, kw_only=True)
class Step:
    """Calls of a model. `lanes` has the pieces of each lane, (call, first row, row after the last).

    `repeated` has the content's number of each input that lies where the last request left it.
    """

    model: int
    mesh: int
    calls: tuple[Options, ...]
    lanes: tuple[tuple[tuple[int, int, int], ...], ...]
    repeated: dict[str, int]
    pipeline: tuple[CachedKeys, ...]


@dataclass(frozen=True, kw_only=True)
class GroupWork:
    """What of a whole run one lane does: images `start` to `stop`, for the conditionings named.

    With `exchange`, the others of the cfg axis do the same images for the other conditionings.
    """

    start: int
    stop: int
    conds: tuple[int, ...]
    exchange: bool = False


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A whole sampling run; fields as those of `pool/resident.py`'s `ResidentRun`."""

    model: int
    mesh: int
    program: Program
    cfg: float
    lanes: tuple[GroupWork, ...]
    calls: tuple[Options, ...]
    modulation_bytes: int
    timeline: bool


@dataclass(frozen=True, kw_only=True)
class CheckCopies:
    """Exchange a known pattern over a mesh, and count the bytes that arrive wrong."""

    mesh: int


@dataclass(frozen=True, kw_only=True)
class MeasureDevice:
    """Say what the device is: memory and speed."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Measure the device, and the exchanges over a mesh's ulysses axis."""

    mesh: int


@dataclass(frozen=True, kw_only=True)
class Trim:
    """Keep nothing of sampling runs that ended; `ranks` give back what torch caches on their device, too."""

    ranks: tuple[int, ...]


AnyRequest: TypeAlias = (
    Load | Unload | ChangeWeights | SetStrengths | MakeMesh | Step | Sample | CheckCopies | MeasureDevice | Probe | Trim
)
OPS: dict[type, Op] = {
    Load: Op.LOAD,
    Unload: Op.UNLOAD,
    ChangeWeights: Op.PATCH,
    SetStrengths: Op.STRENGTHS,
    MakeMesh: Op.MESH,
    Step: Op.STEP,
    Sample: Op.RUN,
    CheckCopies: Op.CHECK,
    MeasureDevice: Op.MEASURE,
    Probe: Op.PROBE,
    Trim: Op.TRIM,
}
KINDS: dict[Op, type] = {op: kind for kind, op in OPS.items()}


def to_body(request: AnyRequest) -> dict[str, Any]:
    """Plain values for a message's JSON object; `from_body` is the inverse."""
    return {field.name: _plain(getattr(request, field.name)) for field in fields(request)}


def from_body(op: Op, body: Mapping[str, Any]) -> AnyRequest:
    """The request that came as `op`. Raises ProtocolError for a field that is unknown, missing or of another type."""
    if op not in KINDS:
        raise ProtocolError(f"{op.name} is no request; a rank answers {', '.join(sorted(each.name for each in KINDS))}")
    request: AnyRequest = _record(KINDS[op], body, op.name)
    return request


def _plain(value: Any) -> Any:  # noqa: ANN401  whatever a field may hold
    if isinstance(value, ParallelPlan | Program):
        return value.to_dict()
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def _record(kind: type, values: object, where: str) -> Any:  # noqa: ANN401  one of `kind`
    """An instance of a dataclass of the fields' own types."""
    if not isinstance(values, Mapping):
        raise ProtocolError(f"{where} is {values!r}, not an object")
    readers = _readers(kind)
    unknown, missing = sorted(values.keys() - readers.keys()), sorted(_required(kind) - values.keys())
    if unknown or missing:
        said = [f"unknown {', '.join(unknown)}"] * bool(unknown) + [f"missing {', '.join(missing)}"] * bool(missing)
        raise ProtocolError(f"{where}: {'; '.join(said)}; the parent and this rank are of different versions")
    return kind(**{name: readers[name](value, f"{where}.{name}") for name, value in values.items()})


Reader: TypeAlias = Callable[[Any, str], Any]


@functools.cache
def _readers(kind: type) -> dict[str, Reader]:
    hints = typing.get_type_hints(kind)
    return {field.name: _reader(hints[field.name]) for field in fields(kind)}


@functools.cache
def _required(kind: type) -> frozenset[str]:
    return frozenset(
        field.name for field in fields(kind) if field.default is MISSING and field.default_factory is MISSING
    )


def _reader(hint: Any) -> Reader:  # noqa: ANN401  any type a field may have
    """What turns JSON's value into one of the type, or refuses it."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        (inner,) = (each for each in arguments if each is not type(None))
        read = _reader(inner)
        return lambda value, where: None if value is None else read(value, where)
    if origin is tuple:
        return _tuple_reader(arguments)
    if origin is dict:
        keys, items = (_reader(each) for each in arguments)
        return lambda value, where: {
            keys(key, where): items(item, f"{where}.{key}") for key, item in _of(dict, value, where).items()
        }
    if hint in (ParallelPlan, Program):
        return lambda value, where: hint.from_dict(_of(dict, value, where))
    if is_dataclass(hint):
        return lambda value, where: _record(typing.cast(type, hint), value, where)
    if hint is Any:
        return lambda value, _: value
    return lambda value, where: _of(hint, value, where)


def _tuple_reader(arguments: tuple[Any, ...]) -> Reader:
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        read = _reader(arguments[0])
        return lambda value, where: tuple(
            read(item, f"{where}[{number}]") for number, item in enumerate(_of(list, value, where))
        )
    items = [_reader(each) for each in arguments]

    def read_all(value: object, where: str) -> tuple[Any, ...]:
        if len(_of(list, value, where)) != len(items):
            raise ProtocolError(f"{where} has {len(_of(list, value, where))} values, not {len(items)}")
        return tuple(read(item, where) for read, item in zip(items, _of(list, value, where), strict=True))

    return read_all


def _of(kind: type, value: Any, where: str) -> Any:  # noqa: ANN401  one of `kind`
    """The value when it is of the type; an int is a float too, a bool is no number."""
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ProtocolError(f"{where} is {value!r}, not of type {kind.__name__}")
    return value
