"""Blocks of ComfyUI's unmodified module as CUDA graphs, below the hooks that share its tokens.

    graphs = BlockGraphs(blocks_of(model), partial(CudaRecorder, device))
    run = GraphRun(graphs, version=0, watch=watch)
    with run.calling(sequence):
        out = model(x, t, context=...)
    run.report()

A block that is given arguments of a new form runs as it is. The second time it is recorded, its exchanges included, and
from then on replayed: the host starts one graph where it started dozens of operations. A graph has the addresses of
what it reads and the numbers that Python had, so:

- Arguments are copied into buffers of their own, one for each distinct argument, and back where the block writes to
  them; what it returns is copied out. Nothing that the model holds is memory of a graph.
- All else is in the form: constants, shapes, strides, which arguments are one tensor, and the tokens of every rank, so
  that ranks find a form again alike. Graphs are of one version of the weights and one mesh; of another all are dropped.
- A graph replays exchanges that the others of its communicator replay too: ranks agree on each that is recorded.
- A failed recording may cost memory: what waits for its device is not tried, nor a kind again that was in vain.
  One wait may be of a first call alone, as where it builds a table: then ranks look at the second one, too.

Every block copies its arguments, those too that all blocks are given: no tensor of inference mode has a version that
would tell whether the model wrote to it between two blocks.

Owns which blocks run by which graph. Does not own how a graph is made (cuda_graphs.py), nor for which calls
(worker/hosted.py).
"""

import copy
import dataclasses
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from ...parallel.attention import SequenceParallelAttention
from ...parallel.kernels import ATTENDED
from ...wire.replies import CompiledReport as Report
from ..block_chain import Forward
from .attention import installed
from .call import TokenCall
from .closures import held_by, holding
from .compiled import PATCHES, CompiledBlocks, Kind
from .cuda_graphs import GraphRecorder, Replay
from .graphs import Watch
from .kept_state import numbers_over
from .stock_functions import OVERRIDE

FORMS = 4  # of a block's calls at a time: two texts, and those of the size before
LARGEST_BYTES = 128 << 20  # of a block's arguments; with more of them no device waits for its host
NO_REASON, WAITED, OF_FORM, OF_KIND = range(4)  # why a rank has none: its first call, what it is given, a try in vain
PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size)  # constants that `==` compares


class CannotRecordError(Exception):
    """Why a block has no graph."""


class Buffers:
    """Memory that graphs read or write and that outlives them, by shape and dtype."""

    def __init__(self) -> None:
        self._held: dict[Hashable, list[Tensor]] = {}

    def take(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """One for each of these, like it, and no two the same; those of another block may be."""
        taken, found = dict[Hashable, int](), list[Tensor]()
        for tensor in tensors:
            like = _looks(tensor)
            held, number = self._held.setdefault(like, []), taken.get(like, 0)
            taken[like] = number + 1
            if number == len(held):
                held.append(torch.empty_like(tensor))
            found.append(held[number])
        return found


@dataclass
class Seen:
    """A form that was met: where its results will go, which arguments it wrote to, or why it is not recorded."""

    outs: list[Tensor]
    written: frozenset[int] = frozenset()
    reason: str = ""
    of: int = NO_REASON


@dataclass
class RecordedBlock:
    """A graph of one block, its buffers, and what the block counts.

    `given` are buffers of one dtype, and which arguments each takes; `written` those that it writes to, and `buffers`
    all by id; `out` the results, in buffers, those of arguments where it returns these. The others are counted:
    exchanges and their bytes, keys, kernels of attention, and whether heads travelled rounded.
    """

    replay: Replay
    written: list[tuple[Tensor, int]]
    buffers: dict[int, int]
    given: list[tuple[list[Tensor], list[int]]]
    out: Any
    sent: tuple[int, int]
    most_keys: int
    attended: frozenset[str]
    rounded: bool


@dataclass
class BlockGraphs:
    """The graphs of a model's blocks on one rank.

    `of`: the version of its weights and the attention that they are for; `known`: by block and form, a text where it
    stays without; `refused`: why no more of a kind are recorded, by its id, as one was tried in vain on some rank;
    `forgot`: some went, as a block had too many.
    """

    blocks: CompiledBlocks
    new_recorder: Callable[[], GraphRecorder]
    of: tuple[object, ...] = ()
    known: dict[int, OrderedDict[Hashable, Seen | RecordedBlock | str]] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    given: Buffers = field(default_factory=Buffers)
    outs: Buffers = field(default_factory=Buffers)
    recorder: GraphRecorder | None = None
    forgot: bool = False

    @property
    def count(self) -> int:
        """How many graphs there are."""
        return sum(isinstance(state, RecordedBlock) for forms in self.known.values() for state in forms.values())

    def drop(self) -> None:
        """Have none, nor their memory."""
        self.of, self.recorder, self.forgot = (), None, False
        self.known, self.refused, self.given, self.outs = {}, {}, Buffers(), Buffers()

    def begin(self, version: int, sequence: SequenceParallelAttention) -> GraphRecorder:
        """Have none but those of these weights and this attention, and say what records further ones."""
        of = (version, sequence, sequence.named, sequence.exchange)
        if self.of != of or self.recorder is None:
            self.drop()
            self.of, self.recorder = of, self.new_recorder()
        return self.recorder


class GraphRun:
    """One request by graphs, or with `why_not` as it is: what ran without, and why."""

    def __init__(self, graphs: BlockGraphs, *, version: int, watch: Watch, why_not: str = "") -> None:
        self._graphs, self._version, self._watch = graphs, version, watch
        self._why_not = why_not or graphs.blocks.reason
        kinds = (kind.reason for _, kind, _ in graphs.blocks.entrances)  # some of which no forward is called
        self._as_they_were, self._reasons = 0, dict.fromkeys(filter(None, [self._why_not] if self._why_not else kinds))

    @contextmanager
    def calling(self, sequence: SequenceParallelAttention) -> Iterator[None]:
        """Around a call of the model that the ranks of `sequence` share. One whose parts are timed runs as it is."""
        entrances = self._graphs.blocks.entrances
        if not self._why_not and not self._watch.timer.on:
            self._sequence, self._recorder = sequence, self._graphs.begin(self._version, sequence)
            for number, (entrance, kind, _) in enumerate(entrances):
                entrance.instead = partial(self._block, number, kind, entrance.inner)
        try:
            yield
        finally:
            for entrance, *_ in entrances:
                entrance.instead = None

    def _block(
        self,
        number: int,
        kind: Kind,
        inner: Forward,
        *args: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """A block's output; `inner` computes it without a graph."""
        try:
            found, out = self._by_graph(number, kind, inner, args, kwargs)
            if found:
                return out
        except CannotRecordError as error:
            self._reasons[str(error)] = None
            out = inner(*args, **kwargs)
        self._as_they_were += 1
        return out

    def report(self) -> Report:
        """What graphs there are, and what this request's took."""
        return Report(
            graphs=self._graphs.count,
            uncompiled_blocks=self._as_they_were,
            compile_s=self._watch.compile_s,
            reason="; ".join(self._reasons),
        )

    def _by_graph(
        self, number: int, kind: Kind, inner: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[bool, Any]:
        """Whether a graph computed a block's output, and the output. Raises `CannotRecordError` before anything ran."""
        if kind.reason:
            raise CannotRecordError(kind.reason)
        mine, named, options = kind.read(args, kwargs)
        if type(options) is dict and any(options.get(name) for name in (PATCHES, "patches_replace", OVERRIDE)):
            raise CannotRecordError(f"{kind.title} is patched in this call")
        tensors: list[Tensor] = []
        call = installed().call
        form = (_tokens(call), _form(mine, tensors), _form(named, tensors))
        forms = self._graphs.known.setdefault(number, OrderedDict())
        known, wait = forms.get(form), WAITED
        if not isinstance(known, RecordedBlock) and id(kind) in self._graphs.refused:
            raise CannotRecordError(self._graphs.refused[id(kind)])
        if isinstance(known, Seen):
            known, wait = self._recorded(kind, inner, mine, named, tensors, known), OF_FORM
        if known is None:
            forms[form], out = self._first(kind, call, partial(inner, *args, **kwargs), tensors, wait)
            forms.move_to_end(form)
            if len(forms) > FORMS:
                forms.popitem(last=False)
                self._graphs.forgot = True
            return False, out
        forms[form] = known
        forms.move_to_end(form)
        if isinstance(known, str):
            raise CannotRecordError(known)
        return True, self._again(known, tensors)

    def _first(
        self, kind: Kind, call: TokenCall | None, run: Callable[[], Any], tensors: list[Tensor], wait: int
    ) -> tuple[Seen, Any]:
        """Compute a block as it is, and look whether a graph could. `wait`: what one is that waits for its device."""
        before, device = [tensor.clone() for tensor in tensors], self._recorder.device
        with self._recorder.noting_waits() as waits:
            out = run()
        try:
            leaves: list[Tensor] = []
            _form(out, leaves)
            if waits:
                raise CannotRecordError(f"{kind.title} has the host wait for its device, which no graph can")
            if elsewhere := {str(each.device) for each in (*tensors, *leaves) if each.device != device}:
                raise CannotRecordError(f"{kind.title} has tensors on {min(elsewhere)}, and graphs are of {device}")
            if sum(tensor.nbytes for tensor in tensors) > LARGEST_BYTES:
                raise CannotRecordError(f"{kind.title} is given more than {LARGEST_BYTES >> 20} MiB; use more ranks")
            if call is not None and _remembers(call):
                raise CannotRecordError(f"attention in {kind.title} finds keys of a block before it")
            known = {id(tensor): place for place, tensor in enumerate(tensors)}
            written = {place for place, each in enumerate(before) if not torch.equal(each, tensors[place])}
            written |= {known[id(leaf)] for leaf in leaves if id(leaf) in known}
            storages = [tensor.untyped_storage()._cdata for tensor in tensors]
            if any(storages.count(storages[place]) > 1 for place in written):
                raise CannotRecordError(f"{kind.title} writes to memory that several of its arguments share")
        except CannotRecordError as error:
            return Seen([], reason=str(error), of=wait if waits else OF_FORM), out
        return Seen(self._graphs.outs.take([leaf for leaf in leaves if id(leaf) not in known]), frozenset(written)), out

    def _recorded(
        self,
        kind: Kind,
        inner: Forward,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[Tensor],
        seen: Seen,
    ) -> RecordedBlock | str | None:
        """A graph of a block, or why there is none: on every rank of the communicator, or on none. None where one has
        waited in its first call, and nothing else is wrong on any."""
        began, sequence, traffic = time.perf_counter(), self._sequence, self._sequence.ulysses.traffic
        before = traffic.calls, traffic.num_bytes, sequence.most_keys, sequence.rounded, frozenset(ATTENDED)
        traffic.calls = traffic.num_bytes = sequence.most_keys = 0
        sequence.rounded = False
        ATTENDED.clear()
        reason, of, found = seen.reason, seen.of, list[RecordedBlock]()
        try:
            if not reason:
                found.append(self._record(inner, args, kwargs, tensors, seen))
        except (CannotRecordError, RuntimeError) as error:  # also one of memory, of which a recording needs more
            first_line = str(error).strip().partition("\n")[0]
            of, reason = OF_KIND, f"no graph of {kind.title} can be recorded: {first_line or type(error).__name__}"
        finally:
            traffic.calls, traffic.num_bytes, sequence.most_keys, sequence.rounded = before[:4]
            ATTENDED.clear()
            ATTENDED.update(before[4])
        # the error, by which all that it ran with was held, is gone
        if worst := max(numbers_over(sequence, self._recorder.device, of)):
            reason = reason or f"no graph of {kind.title} can be recorded on another rank"
            if worst == OF_KIND:
                self._graphs.refused[id(kind)] = reason
        self._watch.compile_s += time.perf_counter() - began
        return None if worst == WAITED else reason or found[0]

    def _record(
        self,
        inner: Forward,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[Tensor],
        seen: Seen,
    ) -> RecordedBlock:
        buffers = self._graphs.given.take(tensors)
        for buffer, tensor in zip(buffers, tensors, strict=True):
            buffer.copy_(tensor)
        places = {id(tensor): buffer for tensor, buffer in zip(tensors, buffers, strict=True)}
        given, named = (_replaced(each, lambda tensor: places[id(tensor)]) for each in (args, kwargs))
        constants, result, outs = (_form(given, []), _form(named, [])), list[Any](), seen.outs
        known = {id(buffer): place for place, buffer in enumerate(buffers)}

        def run() -> None:
            out = inner(*given, **named)
            leaves: list[Tensor] = []
            _form(out, leaves)
            leaves = [leaf for leaf in leaves if id(leaf) not in known]
            if list(map(_looks, leaves)) != list(map(_looks, outs)):
                raise CannotRecordError("it returns other shapes than before")
            if outs:
                torch._foreach_copy_(outs, leaves)
            back = {id(leaf): buffer for leaf, buffer in zip(leaves, outs, strict=True)}
            result.append(_replaced(out, lambda tensor: back.get(id(tensor), tensor)))

        replay, traffic = self._recorder.record(run), self._sequence.ulysses.traffic
        if constants != (_form(given, []), _form(named, [])):
            raise CannotRecordError("it writes to the options that it is given")
        by_dtype: dict[torch.dtype, tuple[list[Tensor], list[int]]] = {}
        for place, buffer in enumerate(buffers):  # of one dtype, all are copied by one kernel
            some, numbers = by_dtype.setdefault(buffer.dtype, ([], []))
            some.append(buffer)
            numbers.append(place)
        return RecordedBlock(
            replay=replay,
            written=[(buffers[place], place) for place in sorted(seen.written)],
            buffers=known,
            given=list(by_dtype.values()),
            out=result[0],
            sent=(traffic.calls, traffic.num_bytes),
            most_keys=self._sequence.most_keys,
            attended=frozenset(ATTENDED),
            rounded=self._sequence.rounded,
        )

    def _again(self, graph: RecordedBlock, tensors: list[Tensor]) -> Any:  # noqa: ANN401
        for buffers, places in graph.given:
            torch._foreach_copy_(buffers, [tensors[place] for place in places])
        graph.replay()
        for buffer, place in graph.written:
            tensors[place].copy_(buffer)
        traffic = self._sequence.ulysses.traffic
        traffic.calls += graph.sent[0]
        traffic.num_bytes += graph.sent[1]
        self._sequence.most_keys = max(self._sequence.most_keys, graph.most_keys)
        ATTENDED.update(graph.attended)
        self._sequence.rounded |= graph.rounded

        def handed_on(tensor: Tensor) -> Tensor:
            place = graph.buffers.get(id(tensor))
            return tensor.clone() if place is None else tensors[place]

        return _replaced(graph.out, handed_on)


def _tokens(call: TokenCall | None) -> Hashable:
    """How the tokens of a call lie on all ranks, and whole ranges of them: where one rank's part is another one, those
    of all ranks are another call's."""
    if call is None:
        return None
    return tuple(call.streams.items()), frozenset(call.uncut), call.grid, tuple(call.ranges.items())


def _remembers(call: TokenCall) -> bool:
    """Whether an attention of the block that runs looks for what another one kept."""
    return any(each is not None and each.again for each in (call.attention, *call.inside.values()))


def _looks(tensor: Tensor) -> Hashable:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _form(value: Any, tensors: list[Tensor]) -> Hashable:  # noqa: ANN401
    """What a graph holds for: all of a value but the numbers in its tensors, which are added, each once.

    Raises `CannotRecordError` for what cannot be compared.
    """
    if type(value) in (Tensor, nn.Parameter):
        place = next((place for place, each in enumerate(tensors) if each is value), len(tensors))
        if place == len(tensors):
            tensors.append(value)
        return place, _looks(value)
    if type(value) in (tuple, list):
        return type(value), *(_form(each, tensors) for each in value)
    if type(value) is dict:
        return dict, *((name, _form(each, tensors)) for name, each in value.items())
    if isinstance(value, PLAIN):
        return type(value), value
    if type(value) is FunctionType and (held := held_by(value)):
        return value.__code__, value.__module__, _form(held, tensors)
    if names := _fields(value):
        return type(value), *((name, _form(getattr(value, name), tensors)) for name in names)
    raise CannotRecordError(f"a block is given or returns a {type(value).__name__}, of which no graph can be made")


def _replaced(value: Any, by: Callable[[Tensor], Tensor]) -> Any:  # noqa: ANN401
    """The value with other tensors."""
    if isinstance(value, Tensor):
        return by(value)
    if type(value) in (tuple, list):
        return type(value)([_replaced(each, by) for each in value])
    if type(value) is dict:
        return {name: _replaced(each, by) for name, each in value.items()}
    if type(value) is FunctionType and (held := held_by(value)):
        return holding(value, _replaced(held, by))
    if isinstance(value, PLAIN) or not (names := _fields(value)):
        return value
    other = copy.copy(value)
    for name in names:
        object.__setattr__(other, name, _replaced(getattr(value, name), by))  # which a frozen dataclass refuses
    return other


def _fields(value: Any) -> list[str]:  # noqa: ANN401
    """The names of all that an object holds, where its class says what that is: a dataclass, or `__slots__` alone."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [each.name for each in dataclasses.fields(value)]
    if hasattr(value, "__dict__"):
        return []
    return [name for base in type(value).__mro__ for name in vars(base).get("__slots__", ())]
