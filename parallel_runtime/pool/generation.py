"""One generation of ranks: started together with what they share, asked, heard, and ended together.

Owns what was asked and is still owed, and judges deaths. Which rank is silent is ranks.py's; who is blamed, and the
words, failures.py's; one rank is process/rank_process.py's, or remote_ranks.py's.
"""

import logging
import os
import select
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from ..checkpoint import ModelSpec
from ..errors import PoolError
from ..kernel_calls import MFD_CLOEXEC, memfd_create
from ..machines.machine import LOOK_THERE, Machine
from ..plan import MAX_RANKS
from ..process import nccl_segments
from ..process.environment import RankSettings
from ..process.rank_process import REAP_TIMEOUT_S, spawn
from ..wire.channel import Attach, Segment, SegmentTable
from ..wire.protocol import Message, Op, ProtocolError, TensorSpec, encode
from ..wire.records import from_body, to_body
from ..wire.replies import OPS, Cancelled, Compiling, Hello, Memory, MemoryReply, Progress, RankError, Ready
from ..wire.requests import Request
from .arena import Arena
from .failures import (
    FRESH,
    Failure,
    choose,
    explain,
    failure_of_error,
    hint,
    other_version,
    pool_error,
    system_error,
)
from .ranks import PULSE_LATE_S, AnyRank, Watcher, find_silence, least_s, listen_anew
from .remote_ranks import RemoteRank, RemoteRanks

TICK_S = 0.05  # how often the caller is asked whether to go on, and heartbeats are read
HELD_UP = 0.5  # of the deadline: after a longer pause of the parent (a frozen container, a caller) silence starts anew
SETTLE_S = 2.0  # how long to look for the cause when the first sign may be only a consequence: a process with CUDA
# contexts closes its descriptors a while before its exit is seen
STOP_S = 2.0  # how long idle ranks get to end by themselves
CLOSED = "closed its channel"
GIVEN_UP_EARLY = (Op.LOAD, Op.CHANGE, Op.SAMPLE, Op.DECODE)

_log = logging.getLogger(__name__)

Answer = TypeVar("Answer")


@dataclass
class InFlight(Generic[Answer]):
    """What ranks were asked, and what came back so far, by rank, as `on_progress` gets it; `on_done` gets the replies.

    `reply` is the kind of answer; a rank that was told to give the request up says `Cancelled` in its place.
    """

    op: Op
    number: int
    deadline_s: float
    reply: type[Answer]
    on_progress: Callable[[Mapping[int, Progress]], None] = lambda _: None
    on_done: Callable[[list[Answer | Cancelled]], None] = lambda _: None
    progress: dict[int, Progress] = field(default_factory=dict)
    replies: dict[int, Answer | Cancelled] = field(default_factory=dict)
    compiling: set[int] = field(default_factory=set)  # ranks that make a graph now
    has_news: bool = False
    listened_s: float = field(default_factory=time.monotonic)  # since when only the ranks can have held it up

    @property
    def ranked(self) -> list[Answer | Cancelled]:
        """The replies in rank order."""
        return [reply for _, reply in sorted(self.replies.items())]

    def tell_news(self) -> None:
        """Have `on_progress` get what it has not had yet. Raises what that raises."""
        if self.has_news:
            self.has_news = False
            self.on_progress(self.progress)


class Generation:
    """All ranks of one start, asked and watched. Use it from one thread at a time.

    A method that waits raises PoolError when a rank has failed: by then all ranks have been killed and reaped, `ended`
    is true, and `on_failure` has been told. Making one raises PoolError when the system does not let a rank start.
    `on_death` is called from another thread when a rank ends; it is to call `bury`, once no other method runs.
    `requests` gives their numbers, which rise over all generations. `deadline_s()`: how long a rank that owes an answer
    may show no pulse, a few seconds at least, and a request without a deadline of its own no sign of life.
    """

    def __init__(
        self,
        number: int,
        settings: RankSettings,
        requests: Iterator[int],
        *,
        segment_bytes: int,
        start_deadline_s: float,
        deadline_s: Callable[[], float],
        on_death: Callable[["Generation"], None],
        on_failure: Callable[[PoolError], None],
        machines: Sequence[Machine] = (),
    ) -> None:
        self.number = number
        self.ended = False
        self.ranks: list[AnyRank] = []  # in rank order
        self.remote: RemoteRanks | None = None
        self.segments: SegmentTable
        self.watcher: Watcher
        self._epoll: select.epoll
        self._held = ExitStack()
        self.in_flight: InFlight[Any] | None = InFlight(Op.READY, 0, start_deadline_s, Ready)
        self.arena: Arena
        self.told_ranks = 0  # how many were asked with the tensors that lie in the arena
        self.memory: list[Memory] = []  # as each rank said last
        self.mapped: dict[int, ModelSpec] = {}  # files that ranks may have mapped, by model handle
        self._signs: list[Failure] = []  # what went wrong, in the order seen
        self._last_words: dict[int, Failure] = {}  # of ranks that are not listened to any more
        self._over_nccl = False  # whether ranks exchange over NCCL
        self._whole = True  # false while something has been sent to some ranks and not to all
        self._asked = self.ranks  # ranks that owe answers to the request in flight, or answered the last one
        self._requests, self._on_failure, self._deadline_s = requests, on_failure, deadline_s
        try:
            self._start(
                settings,
                segment_bytes,
                machines=machines,
                deadline_s=start_deadline_s,
                on_death=lambda: on_death(self),
            )
        except PoolError as error:
            if not self.ended:  # else a rank has failed, of which the pool has been told
                self.fail(error)
            raise
        except OSError as error:
            raise self.fail(system_error("a rank cannot be started", error)) from error

    @property
    def ready(self) -> bool:
        """Whether all ranks have started."""
        return self.in_flight is None or self.in_flight.reply is not Ready

    @property
    def machines(self) -> list[Machine]:
        """The further machines that have a part in it, in the order of their ranks."""
        return [] if self.remote is None else self.remote.machines

    @property
    def devices_by_machine(self) -> tuple[int, ...]:
        """How many ranks each machine has, ours first."""
        further = [len(machine.devices) for machine in self.machines]
        return (len(self.ranks) - sum(further), *further)

    def reach(self, num_ranks: int = MAX_RANKS) -> int:
        """How many ranks are asked for what the first `num_ranks` are to do: those of every machine that has one."""
        return len(self.ranks) if self.remote is None else self.remote.reach(num_ranks)

    def attach(self, segment: Attach, fd: int) -> None:
        """Hand all ranks a segment, and have them forget those that it replaces."""
        self._send(self._packets(self.ranks[: self.reach()], Op.ATTACH, 0, to_body(segment)), fds=(fd,))

    def ask(
        self,
        request: Request[Answer],
        check: Callable[[], None],
        tensors: tuple[TensorSpec, ...] = (),
        *,
        num_ranks: int = MAX_RANKS,
        deadline_s: float | None = None,
        on_sent: Callable[[], None] = lambda: None,
        on_progress: Callable[[Mapping[int, Progress]], None] = lambda _: None,
        on_done: Callable[[list[Answer | Cancelled]], None] = lambda _: None,
    ) -> list[Answer]:
        """The replies, in rank order, of the first `num_ranks`, and of all that are on a machine with one of them.

        `tensors` lie in the arena. `deadline_s`: how long it may show no sign of life; by default what the generation
        has. `on_sent` is called once the ranks have it, `on_progress` with what each has said. Whatever `check`, which
        is called every 50 ms, or a callback raises passes through: the request is given up, stays in flight until the
        ranks have answered, and `on_done` is called then. Raises ProtocolError, before anything is sent, for what
        cannot travel.
        """
        limit_s = self._deadline_s() if deadline_s is None else deadline_s
        number = next(self._requests)
        in_flight = InFlight(request.op, number, limit_s, request.reply, on_progress=on_progress, on_done=on_done)
        try:
            check()
            reach = self.reach(num_ranks)
            asked = self.ranks[:reach]
            packets = self._packets(asked, request.op, number, to_body(request), tensors, check=check)
            self.in_flight, self._asked = in_flight, asked
            listen_anew(asked)
            self._send(packets)
            self.told_ranks = reach if tensors else self.told_ranks
        except BaseException:
            self.arena.forget()
            raise
        try:
            on_sent()
            self.wait(check)
        finally:
            if self.in_flight is in_flight:  # the caller does not want it any more, nor to hear of it
                in_flight.on_progress = lambda _: None
                if request.op in GIVEN_UP_EARLY:
                    self.segments.cancelled_request = number
        return [reply for reply in in_flight.ranked if not isinstance(reply, Cancelled)]

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
            request.tell_news()
            now = time.monotonic()
            if now >= looked_s + TICK_S:
                if now - looked_s > min(request.deadline_s, least_s(self._deadline_s())) * HELD_UP:
                    request.listened_s = now
                looked_s = now
                self._refuse_silence(request)
                tick()
        request.tell_news()
        self.in_flight = None
        memory = [reply.memory for reply in request.ranked if isinstance(reply, MemoryReply)]
        if len(memory) == len(request.replies):
            self.memory = [*memory, *self.memory[len(memory) :]]
        request.on_done(request.ranked)

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
        """Kill and reap all ranks, and close everything. The request in flight is given up.

        Views of our segments stay valid; NCCL's in /dev/shm go.
        """
        self.in_flight = None
        if self.ended:
            return
        self.ended = True
        segments = nccl_segments.segments_of(rank.pid for rank in self.ranks)  # NCCL removes none of a killed rank's
        if self.remote is not None:
            self.remote.kill()
        for rank in self.ranks:
            rank.kill()
        for rank in self.ranks:
            if not rank.reap():
                _log.warning("rank %d (process %d) does not end after SIGKILL", rank.rank, rank.pid)
        for machine in () if self.remote is None else self.remote.reap():
            _log.warning(
                "%s has not said in %g s that its ranks have ended; it starts no others before", machine, REAP_TIMEOUT_S
            )
        nccl_segments.remove(segments)
        self._held.close()

    def fail(self, error: PoolError) -> PoolError:
        """End all ranks because of `error`, which is told to the pool and returned to be raised."""
        self.end()
        self._on_failure(error)
        return error

    def _start(
        self,
        settings: RankSettings,
        segment_bytes: int,
        *,
        machines: Sequence[Machine],
        deadline_s: float,
        on_death: Callable[[], None],
    ) -> None:
        """Start all ranks and hand them their first segment. Raises OSError; `end` ends what there is.

        Machines have `deadline_s` for their ranks to start. Raises PoolError for one that is lost.
        """
        with ExitStack() as used:
            store = None
            remote = RemoteRanks(machines, settings)
            if remote.machines:
                self.remote, settings = remote, remote.meet(settings)
            else:
                store = memfd_create("parallel-dit-store", MFD_CLOEXEC)
                used.callback(os.close, store)
                os.fchmod(store, 0o600)
            self._over_nccl = settings.over_nccl
            segment, segment_fd = Segment.create(segment_bytes)
            used.callback(os.close, segment_fd)
            self.segments = SegmentTable(segment)
            self.arena = Arena(self.segments, announce=self.attach)
            self._held.callback(self.arena.close)
            self._epoll = self._held.enter_context(select.epoll(flags=select.EPOLL_CLOEXEC))
            for rank in range(len(settings.devices)):
                self.ranks.append(spawn(rank, settings, generation=self.number, store_fd=store))
            if self.remote is not None:
                self.ranks += self.remote.start(settings, generation=self.number, deadline_s=deadline_s)
            for each in self.ranks:
                self._epoll.register(each.channel, select.EPOLLIN)
                self._epoll.register(each.pidfd, select.EPOLLIN)
            self.watcher = Watcher(self.ranks, on_death=on_death)
            self._held.callback(self.watcher.stop)
            self.attach(Attach(segment=0, num_bytes=segment_bytes, drop=()), segment_fd)

    def _dismiss(self) -> None:
        """Ask idle ranks to end, and wait until all have, at most a moment."""
        for rank in self.ranks:
            with suppress(OSError):  # it is gone, or will be killed
                rank.channel.send(Message(Op.STOP, rank.rank, self.number, 0))
        poll = select.poll()
        alive = {rank.pidfd for rank in self.ranks}
        for pidfd in alive:
            poll.register(pidfd, select.POLLIN)
        until = time.monotonic() + STOP_S
        while alive and (left_s := until - time.monotonic()) > 0:
            for pidfd, _ in poll.poll(left_s * 1000):
                poll.unregister(pidfd)
                alive.remove(pidfd)

    def _packets(
        self,
        ranks: list[AnyRank],
        op: Op,
        request: int,
        body: dict[str, Any],
        tensors: tuple[TensorSpec, ...] = (),
        check: Callable[[], None] = lambda: None,
    ) -> list[bytes]:
        """One message for each rank, encoded."""
        remote = self.remote
        bodies = [body if remote is None else remote.body_for(rank, op, body, check) for rank in ranks]
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
        """End the generation; the error to raise. Weak signs get a moment for their cause to show; that of a rank
        elsewhere travels."""
        until = time.monotonic() + (SETTLE_S if self.remote is None else PULSE_LATE_S)
        while all(sign.weak for sign in self._signs) and (left_s := until - time.monotonic()) > 0:
            self._look(left_s)
        starting = not self.ready
        failure = explain(choose(self._signs), files=self.mapped.values(), starting=starting)
        self.end()  # before the wording: what the rank printed is complete then, and what is in flight forgotten
        rank = self.ranks[failure.rank]
        told = {"printed": rank.output.text(), "device": rank.place}
        hangs_by = hint(
            over_nccl=self._over_nccl,
            machines=any(isinstance(each, RemoteRank) for each in self._asked),
            starting=starting,
        )
        return self.fail(pool_error(failure, **told, starting=starting, hangs_by=hangs_by))


def _unasked(message: Message) -> ProtocolError:
    said = f"{message.op.name} to request {message.request} of generation {message.generation}"
    return ProtocolError(f"it answered {said}, which was not asked for")
