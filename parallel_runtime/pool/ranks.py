"""What shows that the ranks of one generation live: a thread waits for deaths, and each rank's signs are read.

Owns how long a rank may show no sign of life, and which rank is the silent one.
"""

import errno
import math
import os
import select
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import TypeAlias

from ..process.rank_process import RankProcess
from ..process.signs import LEAST_S, PASSED_ON_S
from ..wire.channel import SegmentTable
from ..wire.protocol import Op
from .failures import VARIABLE, Failure, silence
from .remote_ranks import RemoteRank

AnyRank: TypeAlias = RankProcess | RemoteRank
PULSE_LATE_S = 2 * PASSED_ON_S  # behind the newest pulse of any rank: one that travels may be on its way
START_S = 600.0
LOAD_S = 600.0
REQUEST_S = 120.0
PEER_CHECK_S = 20.0  # of silence in the check of copies, instead of REQUEST_S: a few MB, which hang on some boards


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


class Watcher:
    """The thread that watches `ranks` from now until `stop`: it takes in what they print, and notices their deaths.

    Each time that some of them end it calls `on_death`, which may wait, in a thread of its own. Raises OSError when
    there is no descriptor left, or no thread.
    """

    def __init__(self, ranks: Sequence[AnyRank], *, on_death: Callable[[], None]) -> None:
        self._outputs = {rank.output.fileno(): rank.output for rank in ranks}
        self._pidfds = {rank.pidfd for rank in ranks}
        self._on_death = on_death
        self._telling: list[threading.Thread] = []
        with ExitStack() as undo:
            self._wake = os.eventfd(0, os.EFD_CLOEXEC)
            undo.callback(os.close, self._wake)
            # An epoll forgets descriptors that are closed: none is mistaken for a later one of the same number.
            self._epoll = undo.enter_context(select.epoll(flags=select.EPOLL_CLOEXEC))
            for fd in (self._wake, *self._pidfds, *self._outputs):
                self._epoll.register(fd, select.EPOLLIN)
            self._held = undo.pop_all()
        self._thread = threading.Thread(target=self._run, name="parallel-dit-watcher", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # of which Python does not say why the system lets us have no thread
            self._held.close()
            raise OSError(errno.EAGAIN, str(error)) from error

    def stop(self) -> None:
        """Tell the thread to end; call once, from any thread."""
        self._on_death = _nothing  # what it calls may hold this set, and with it its segments' memory
        os.eventfd_write(self._wake, 1)

    def join(self) -> None:
        """Wait until the thread has ended, and `on_death`. Do not hold what that waits for."""
        self._thread.join()
        for thread in self._telling:
            thread.join()

    def _run(self) -> None:
        with self._held:
            while True:
                ready = {fd for fd, _ in self._epoll.poll()}
                if self._wake in ready:
                    return
                for fd in ready & self._outputs.keys():
                    if not self._outputs[fd].drain():
                        self._forget(fd)
                if dead := ready & self._pidfds:
                    self._pidfds -= dead
                    for fd in dead:
                        self._forget(fd)
                    self._tell()

    def _tell(self) -> None:
        """Have `on_death` called beside this thread: others may be in a request, and write more than a pipe takes."""
        thread = threading.Thread(target=self._on_death, name="parallel-dit-death", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system lets us have none
            self._on_death()
        else:
            self._telling.append(thread)

    def _forget(self, fd: int) -> None:
        try:
            self._epoll.unregister(fd)
        except OSError:
            return  # closed meanwhile, so the epoll has forgotten it already


def _nothing() -> None:
    """What a death means to a watcher that has been stopped."""


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
    alive = now_s - awaited.last_pulse_s <= PULSE_LATE_S and request != Op.READY.name
    return silence(awaited, request, silent_s=now_s - awaited.last_heard_s, deadline_s=deadline_s, alive=alive)


def _look_at(rank: AnyRank, segments: SegmentTable, now_s: float) -> None:
    """Note what a rank has shown since the last look. Before its first pulse its process tells whether it gets on."""
    beats, pulses = segments.beats(rank.rank), segments.pulses(rank.rank)
    if beats != rank.last_beats:
        rank.last_beats, rank.last_heard_s = beats, now_s
    if pulses != rank.last_pulses or (pulses == 0 and rank.gets_on()):
        rank.last_pulses, rank.last_pulse_s = pulses, now_s
