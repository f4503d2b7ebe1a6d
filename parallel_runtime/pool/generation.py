"""One generation of ranks: asked, heard, and watched for silence.

Owns how long a rank may show no sign of life, and which rank is the silent one.
"""

import math
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from ..checkpoint import ModelSpec
from ..errors import PoolError
from ..machines.machine import LOOK_THERE, Machine
from ..plan import MAX_RANKS
from ..rank_environment import RankSettings
from ..wire.channel import Attach, SegmentTable
from ..wire.processes import LEAST_S, PASSED_ON_S
from ..wire.protocol import Message, Op, ProtocolError, TensorSpec, encode
from ..wire.records import from_body, to_body
from ..wire.replies import OPS, Cancelled, Compiling, Hello, Progress, RankError, Ready
from .failures import (
    FRESH,
    Failure,
    choose,
    explain,
    failure_of_error,
    other_version,
    pool_error,
    silence,
    system_error,
)
from .ranks import AnyRank, RankSet

START_S = 600.0
LOAD_S = 600.0
REQUEST_S = 120.0
PEER_CHECK_S = 20.0  # a few MB between devices; where those cannot reach each other, copies may hang and not be damaged
VARIABLE = "PARALLEL_DIT_DEADLINE_S"  # what a user of ComfyUI sets


def deadline_from(environment: Mapping[str, str]) -> float:
    """The deadline of a request that `environment` asks for, in seconds; 120 when it does not.

    Raises `ValueError` for anything but a positive number.
    """
    text = environment.get(VARIABLE, "")
    if not text.strip():
        return REQUEST_S
    try:
        return checked(float(text))
    except ValueError:
        raise ValueError(f"{VARIABLE}={text!r} is no positive number of seconds; use for example 300") from None


def checked(deadline_s: float) -> float:
    """The deadline itself. Raises `ValueError` unless it is a positive, finite number of seconds."""
    if not (deadline_s > 0 and math.isfinite(deadline_s)):
        raise ValueError(f"a deadline of {deadline_s} s; use a positive number of seconds")
    return deadline_s


def listen_anew(ranks: Sequence[AnyRank]) -> None:
    """Count the silence of these ranks from now on: they are asked something."""
    now_s = time.monotonic()
    for rank in ranks:
        rank.last_heard_s = rank.last_pulse_s = now_s


def least_s(deadline_s: float) -> float:
    """How long a rank may show no pulse, where a request may show no sign of life for `deadline_s`."""
    return max(deadline_s, LEAST_S)


def find_silence(
    asked: Sequence[AnyRank],
    answered: Collection[int],
    segments: SegmentTable,
    request: str,
    *,
    since_s: float,
    deadline_s: float,
    pulse_deadline_s: float,
) -> Failure | None:
    """The failure of a rank of those asked, which owes an answer to `request` and is silent; None while all are well.

    Silence counts from `since_s` on (monotonic clock) at the earliest.
    """
    now_s = time.monotonic()
    for rank in asked:
        _look_at(rank, segments, now_s)
    owing = [rank for rank in asked if rank.rank not in answered]
    if not owing:
        return None
    longest = min(owing, key=lambda rank: rank.last_pulse_s)
    without_s = now_s - max(since_s, longest.last_pulse_s)
    if without_s > pulse_deadline_s:
        return silence(longest, request, silent_s=without_s, deadline_s=pulse_deadline_s)
    if now_s - max(since_s, *(rank.last_heard_s for rank in asked)) <= deadline_s:
        return None
    # The one that the others most likely wait for: one that a signal holds, else one that shows no pulse (what holds a
    # rank of a further machine is not known here), else one that does not wait itself, else the longest silent.
    pulse_s = max(rank.last_pulse_s for rank in asked) - PULSE_LATE_S
    awaited = min(
        owing,
        key=lambda rank: (
            not rank.is_stopped(),
            rank.last_pulse_s > pulse_s,
            segments.waits(rank.rank),
            rank.last_heard_s,
        ),
    )
    return silence(awaited, request, silent_s=now_s - awaited.last_heard_s, deadline_s=deadline_s)


def _look_at(rank: AnyRank, segments: SegmentTable, now_s: float) -> None:
    """Note what a rank has shown since the last look. Before its first pulse its process tells whether it gets on."""
    beats, pulses = segments.beats(rank.rank), segments.pulses(rank.rank)
    if beats != rank.last_beats:
        rank.last_beats, rank.last_heard_s = beats, now_s
    if pulses != rank.last_pulses or (pulses == 0 and rank.gets_on()):
        rank.last_pulses, rank.last_pulse_s = pulses, now_s


TICK_S = 0.05  # how often the caller is asked whether to go on, and heartbeats are read
PULSE_LATE_S = 2 * PASSED_ON_S  # behind the newest pulse of any rank: one that travels may be on its way
HELD_UP = 0.5  # of the deadline: after a longer pause of the parent (a frozen container, a caller) silence starts anew
SETTLE_S = 0.1  # how long to look for the cause when the first sign may be only a consequence
CLOSED = "closed its channel"

Answer = TypeVar("Answer")


@dataclass
class InFlight(Generic[Answer]):
    """What ranks were asked, and what came back so far, by rank. `on_progress` and `on_done` get the request.

    `reply` is the kind of answer; a rank that was told to give the request up says `Cancelled` in its place.
    """

    op: Op
    number: int
    deadline_s: float
    reply: type[Answer]
    on_progress: Callable[["InFlight[Answer]"], None] = lambda _: None
    on_done: Callable[["InFlight[Answer]"], None] = lambda _: None
    progress: dict[int, Progress] = field(default_factory=dict)
    replies: dict[int, Answer | Cancelled] = field(default_factory=dict)
    compiling: set[int] = field(default_factory=set)  # ranks that make a graph now
    has_news: bool = False
    listened_s: float = field(default_factory=time.monotonic)  # since when only the ranks can have held it up

    def ranked(self) -> list[Answer]:
        """The replies in rank order, of a request that was not given up."""
        return [reply for _, reply in sorted(self.replies.items()) if not isinstance(reply, Cancelled)]


class Generation(RankSet):
    """All ranks of one start, asked and watched. Use it from one thread at a time.

    A method that waits raises PoolError when a rank has failed: by then all ranks have been killed and reaped, `ended`
    is true, and `on_failure` has been told. Making one raises PoolError when the system does not let a rank start.
    `on_death` is called from another thread when a rank ends; it is to call `bury`, once no other method runs.
    `deadline_s()`: how long a rank that owes an answer may show no pulse; a few seconds at least.
    """

    def __init__(
        self,
        number: int,
        settings: RankSettings,
        *,
        segment_bytes: int,
        start_deadline_s: float,
        deadline_s: Callable[[], float],
        on_death: Callable[["Generation"], None],
        on_failure: Callable[[PoolError], None],
        machines: Sequence[Machine] = (),
    ) -> None:
        super().__init__(number)
        self.in_flight: InFlight[Any] | None = InFlight(Op.READY, 0, start_deadline_s, Ready)
        self.mapped: dict[int, ModelSpec] = {}  # files that ranks may have mapped, by model handle
        self._signs: list[Failure] = []  # what went wrong, in the order seen
        self._last_words: dict[int, Failure] = {}  # of ranks that are not listened to any more
        self._whole = True  # false while something has been sent to some ranks and not to all
        self._asked = self.ranks  # ranks that owe answers to the request in flight, or answered the last one
        self._on_failure, self._deadline_s = on_failure, deadline_s
        try:
            self._start(
                settings,
                segment_bytes,
                machines=machines,
                deadline_s=start_deadline_s,
                announce=self.attach,
                on_death=lambda: on_death(self),
            )
        except PoolError as error:
            raise self.fail(error) from error
        except OSError as error:
            raise self.fail(system_error("a rank cannot be started", error)) from error

    @property
    def ready(self) -> bool:
        """Whether all ranks have started."""
        return self.in_flight is None or self.in_flight.reply is not Ready

    def reach(self, num_ranks: int = MAX_RANKS) -> int:
        """How many ranks are asked for what the first `num_ranks` are to do: those of every machine that has one."""
        return len(self.ranks) if self.remote is None else self.remote.reach(num_ranks)

    def attach(self, segment: Attach, fd: int) -> None:
        """Hand all ranks a segment, and have them forget those that it replaces."""
        self._send(self._packets(self.ranks[: self.reach()], Op.ATTACH, 0, to_body(segment)), fds=(fd,))

    def ask(
        self, request: InFlight[Any], body: dict[str, Any], tensors: tuple[TensorSpec, ...] = (), *, num_ranks: int
    ) -> None:
        """Send `request` to the first ranks. Raises ProtocolError, before anything is sent, for what cannot travel."""
        asked = self.ranks[:num_ranks]
        packets = self._packets(asked, request.op, request.number, body, tensors)
        self.in_flight, self._asked = request, asked
        listen_anew(asked)
        self._send(packets)

    def wait(self, tick: Callable[[], None]) -> None:
        """Wait for all answers to the request in flight; without one, only look whether all ranks are well.

        `tick` is called every 50 ms. Whatever it or `on_progress` raises passes through; the request then stays in
        flight, and another `wait` takes in the answers that are still owed.
        """
        if not self._whole:
            raise self.fail(PoolError("a request was interrupted while it was being sent", remedy=FRESH))
        self._take_in(0.0)
        if (request := self.in_flight) is None:
            return
        looked_s = time.monotonic()
        while len(request.replies) < len(self._asked):
            self._take_in(max(0.0, looked_s + TICK_S - time.monotonic()))
            if request.has_news:
                request.has_news = False
                request.on_progress(request)
            now = time.monotonic()
            if now >= looked_s + TICK_S:
                if now - looked_s > min(request.deadline_s, least_s(self._deadline_s())) * HELD_UP:
                    request.listened_s = now
                looked_s = now
                self._refuse_silence(request)
                tick()
        self.in_flight = None
        request.on_done(request)

    def bury(self) -> None:
        """Raise PoolError for a death that no request has noticed."""
        if not self.ended:
            self._take_in(0.0)

    def stop(self) -> None:
        """End all ranks: idle ones are asked to and get a moment, busy ones are killed."""
        if not self.ended and self.in_flight is None and self._whole:
            self._dismiss()
        self.end()

    def end(self) -> None:
        """Kill and reap all ranks, and close everything. The request in flight is given up."""
        self.in_flight = None
        super().end()

    def fail(self, error: PoolError) -> PoolError:
        """End all ranks because of `error`, which is told to the pool and returned to be raised."""
        self.end()
        self._on_failure(error)
        return error

    def _packets(
        self, ranks: list[AnyRank], op: Op, request: int, body: dict[str, Any], tensors: tuple[TensorSpec, ...] = ()
    ) -> list[bytes]:
        """One message for each rank, encoded."""
        remote = self.remote
        bodies = [body if remote is None else remote.body_for(rank, op, body) for rank in ranks]
        numbered = enumerate(bodies)  # ranks are asked from the first one on
        return [encode(Message(op, rank, self.number, request, own, tensors)) for rank, own in numbered]

    def _send(self, packets: list[bytes], fds: tuple[int, ...] = ()) -> None:
        self._whole = False
        for rank, packet in zip(self.ranks, packets, strict=False):
            try:
                rank.channel.send_packet(packet, fds)
            except OSError as error:
                self._signs.append(Failure(rank.rank, f"takes no message: {error}", weak=True))
                self._take_in(0.0)
        self._whole = True

    def _take_in(self, timeout_s: float) -> None:
        """Wait for something to happen and take it in. Raises PoolError when a rank has failed."""
        self._look(timeout_s)
        if self._signs:
            raise self._failed()

    def _look(self, timeout_s: float) -> None:
        ready = {fd for fd, _ in self._epoll.poll(timeout_s)}
        for rank in self.ranks:
            if rank.channel.fileno() in ready:
                self._hear(rank)
        for rank in self.ranks:
            if rank.pidfd in ready:
                self._judge_death(rank)
        if (remote := self.remote) is not None:
            ended, asked = remote.ended_early(self.ranks), len(self._asked)
            self._signs += [Failure(rank, cause, remedy=f"{LOOK_THERE}; {FRESH}") for rank, cause in ended.items()]
            self._signs = [sign for sign in self._signs if not remote.does_without(sign.rank, sign.cause, asked)]

    def _hear(self, rank: AnyRank) -> None:
        """Take in one message. A rank that gives a sign of failure is not listened to any more."""
        sign = self._receive(rank)
        if sign is not None:
            self._epoll.unregister(rank.channel)
            self._last_words[rank.rank] = sign
            self._signs.append(sign)

    def _receive(self, rank: AnyRank) -> Failure | None:
        try:
            received = rank.channel.recv()
            if received is None:
                return Failure(rank.rank, CLOSED, weak=True)
            message, fds = received
            for fd in fds:
                os.close(fd)
            rank.last_heard_s = time.monotonic()
            return self._take(rank, message)
        except (ProtocolError, OSError) as error:
            return Failure(rank.rank, f"broke the protocol: {error}")

    def _take(self, rank: AnyRank, message: Message) -> Failure | None:
        """Note what the rank says. Raises ProtocolError for what it may not say now."""
        if message.op is Op.ERROR:
            return failure_of_error(rank.rank, from_body(RankError, message.body, message.op.name))
        if message.op is Op.HELLO:
            hello = from_body(Hello, message.body, message.op.name)
            if not rank.is_process(hello.pid):
                raise ProtocolError(f"process {hello.pid} says HELLO for {rank.pid}")
            return other_version(rank.rank, hello.version)
        request = self.in_flight
        if request is None or rank.rank in request.replies:
            raise _unasked(message)
        if (message.rank, message.generation, message.request) != (rank.rank, self.number, request.number):
            raise _unasked(message)
        self._note(rank.rank, request, message)
        return None

    def _note(self, rank: int, request: InFlight[Any], message: Message) -> None:
        """Take in what a rank says of the request in flight."""
        name = f"{message.op.name} of {request.op.name}"
        if message.op is Op.PROGRESS:
            request.progress[rank] = from_body(Progress, message.body, name)
            request.has_news = True
        elif message.op is Op.COMPILING:
            begins = from_body(Compiling, message.body, name).begins
            (request.compiling.add if begins else request.compiling.discard)(rank)
        elif message.op is OPS.get(request.reply, Op.DONE):
            request.replies[rank] = from_body(request.reply, message.body, name)
        elif message.op is Op.CANCELLED and self.segments.cancelled_request == request.number:
            request.replies[rank] = from_body(Cancelled, message.body, name)
        else:
            raise _unasked(message)

    def _judge_death(self, rank: AnyRank) -> None:
        """Note how a process ended, unless it has said why: its last messages come before its exit."""
        self._epoll.unregister(rank.pidfd)
        while rank.rank not in self._last_words and rank.channel.has_message():
            self._hear(rank)
        last_words = self._last_words.get(rank.rank)
        if last_words is None or last_words.cause == CLOSED:
            self._signs.append(Failure(rank.rank, rank.end_text()))

    def _refuse_silence(self, request: InFlight[Any]) -> None:
        """Raise PoolError when one of them does not run, or none has shown life for the request's deadline."""
        sign = find_silence(
            self._asked,
            request.replies,
            self.segments,
            request.op.name,
            since_s=request.listened_s,
            deadline_s=request.deadline_s,
            pulse_deadline_s=least_s(self._deadline_s()),
        )
        if sign is not None:
            self._signs.append(sign)
            raise self._failed()

    def _failed(self) -> PoolError:
        """End the generation; the error to raise. Weak signs get a moment for their cause to show."""
        until = time.monotonic() + SETTLE_S
        while all(sign.weak for sign in self._signs) and (left_s := until - time.monotonic()) > 0:
            self._look(left_s)
        starting = not self.ready
        failure = explain(choose(self._signs), files=self.mapped.values(), starting=starting)
        self.end()  # before the wording: what the rank printed is complete then
        rank = self.ranks[failure.rank]
        return self.fail(pool_error(failure, printed=rank.output.text(), device=rank.place, starting=starting))


def _unasked(message: Message) -> ProtocolError:
    said = f"{message.op.name} to request {message.request} of generation {message.generation}"
    return ProtocolError(f"it answered {said}, which was not asked for")
