"""The blocks of one stage of a pipeline: a module whose forward runs these alone.

ComfyUI's forward runs as it is. A block before the stage's first hands back what it was given; the first one is given
what the stage before it sent; where the block after the last one would run, what it is given is sent on, and the pass
ends. So whatever a model does between two blocks is done by the stage of the first of them.

Owns which blocks run and what crosses. Does not own which blocks a stage has (parallel/pipefusion.py), nor links.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import repeat
from typing import Any, Protocol

from torch import Tensor, nn

from ...plan import stages_error
from ..block_chain import STAGE, Forward, chain_at
from ..specs import find_spec, why_without
from ..specs.spec import ShardingSpec
from .pass_call import PassEndsError

# (number of the block, what the one before it hands on, its other arguments) -> what it hands on
Look = Callable[[int, Any, Any], Any]


def refuse_stages(model: nn.Module, stages: int) -> None:
    """Raise `ValueError` when the blocks of a model cannot be in so many stages."""
    spec = find_spec(model)
    if spec is None or spec.one_stage:
        reason = why_without(model) if spec is None else spec.one_stage
        raise ValueError(f"pipefusion={stages}: {type(model).__name__} cannot run in stages: {reason}")
    if error := stages_error(stages, staged_blocks(model, spec)):
        raise ValueError(error)


def staged_blocks(model: nn.Module, spec: ShardingSpec) -> int:
    """How many blocks of a model can be in stages. Raises `ValueError` where none can."""
    modules = dict(model.named_modules())
    return sum(len(list(modules[path].children())) for path in spec.staged if path in modules)


class Neighbours(Protocol):
    """The stages before and after this one.

    A protocol, as `Passes`, which has the links, is in worker/, a layer above.
    """

    def receive(self, like: Sequence[Tensor]) -> list[Tensor]:
        """What the stage before sent, in the shapes of these."""

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Send to the stage after."""


class StagedBlocks:
    """The staged blocks of `model`, by path in the order in which they run, of which a stage has those in `run`.

    `before` are the blocks that every stage runs before them, in the pass of the first patch. While `neighbours` is
    None the model runs as it is. `spec` is one that `refuse_stages` lets pass.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: ShardingSpec,
        blocks: Mapping[str, nn.Module],
        run: range,
        *,
        before: Mapping[str, nn.Module],
    ) -> None:
        self.name, self._run, self._blocks = type(model).__name__, run, len(blocks)
        self.before = spec.streams_before  # of what every stage runs first
        self.neighbours: Neighbours | None = None
        self._look: Look | None = None
        self._next, self._later = 0, False
        for path, block in before.items():
            handed = HandedOn(spec.handed_on(path.rpartition(".")[0]), block)
            chain_at(block).put(STAGE, partial(partial, self._before, handed))
        for number, (path, block) in enumerate(blocks.items()):
            handed = HandedOn(spec.handed_on(path.rpartition(".")[0]), block)
            chain_at(block).put(STAGE, partial(partial, self._placed, number, handed))

    def begin(self, *, later: bool = False) -> None:
        """A pass begins; `later`: of another patch of the same call."""
        self._next, self._later = 0, later

    @contextmanager
    def looked_at(self, look: Look) -> Iterator[None]:
        """Inside, no staged block runs: `look` is given its number, what it is handed and its other arguments, and says
        what it hands on."""
        self._look = look
        try:
            yield
        finally:
            self._look = None

    def _before(self, handed: "HandedOn", inner: Forward, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if self.neighbours is not None and self._later:  # what comes of it is kept (pass_call.py)
            return handed.read(args, kwargs)
        return inner(*args, **kwargs)

    def _placed(self, number: int, handed: "HandedOn", inner: Forward, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if self._look is not None:
            value = handed.read(args, kwargs)
            return self._look(number, value, handed.write(args, kwargs, with_tensors(value, repeat(None))))
        if self.neighbours is None:
            return inner(*args, **kwargs)
        if number != self._next:
            raise ValueError(
                f"{self.name} runs block {number + 1} of {self._blocks} where its plan has block {self._next + 1}, so "
                "it cannot run in stages with this ComfyUI; use pipefusion=1"
            )
        self._next += 1
        if number == self._run.stop:
            self.neighbours.send(tensors_in(handed.read(args, kwargs)))
            raise PassEndsError
        if number not in self._run:
            return handed.read(args, kwargs)
        if number == self._run.start and number:
            value = handed.read(args, kwargs)
            args, kwargs = handed.write(args, kwargs, with_tensors(value, self.neighbours.receive(tensors_in(value))))
        return inner(*args, **kwargs)


class HandedOn:
    """The arguments of a block that one block hands to the next, in the order of its outputs; one alone is no tuple."""

    def __init__(self, names: str | tuple[str, ...], block: nn.Module) -> None:
        taken = list(inspect.signature(type(block).forward).parameters)[1:]
        self._alone = isinstance(names, str)
        self._places = [
            (name, int(name[1:]) if name.startswith("#") else taken.index(name))
            for name in ([names] if isinstance(names, str) else names)
        ]

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        found = tuple(kwargs[name] if name in kwargs else args[place] for name, place in self._places)
        return found[0] if self._alone else found

    def write(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        value: Any,  # noqa: ANN401
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        by_place = list(args)
        for (name, place), each in zip(self._places, (value,) if self._alone else value, strict=True):
            if name in kwargs:
                kwargs[name] = each
            else:
                by_place[place] = each
        return tuple(by_place), kwargs


def tensors_in(value: Any) -> list[Tensor]:  # noqa: ANN401
    """The tensors in a value, tuples, lists and dicts as well, in order."""
    if isinstance(value, Tensor):
        return [value]
    inside = value.values() if isinstance(value, Mapping) else value
    return [t for each in inside for t in tensors_in(each)] if isinstance(value, (tuple, list, Mapping)) else []


def with_tensors(value: Any, tensors: Iterable[Tensor | None]) -> Any:  # noqa: ANN401
    """The value, of tuples and lists, with these for its tensors."""
    left = iter(tensors)

    def put(value: Any) -> Any:  # noqa: ANN401
        if isinstance(value, Tensor):
            return next(left)
        return type(value)([put(each) for each in value]) if isinstance(value, (tuple, list)) else value

    return put(value)
