"""The ranks of one generation: started together with what they share, watched between requests, and ended together.

Owns the set and the thread that looks after it. One rank is process.py's, or remote_ranks.py's.
"""

import logging
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import TypeAlias

from ..machines.machine import Machine
from ..rank_environment import RankSettings
from ..wire import nccl_segments
from ..wire.channel import Attach, Segment, SegmentTable
from ..wire.protocol import Message, Op
from .process import REAP_TIMEOUT_S, RankProcess, spawn
from .remote_ranks import RemoteRank, RemoteRanks


class Watcher:
    """Watches `ranks` from now until `stop`; calls `on_death` once, in its own thread, when one of them ends.

    Raises OSError when there is no descriptor left.
    """

    def __init__(self, ranks: Sequence[RankProcess | RemoteRank], *, on_death: Callable[[], None]) -> None:
        self._outputs = {rank.output.fileno(): rank.output for rank in ranks}
        self._pidfds = {rank.pidfd for rank in ranks}
        self._on_death = on_death
        with ExitStack() as undo:
            self._wake = os.eventfd(0, os.EFD_CLOEXEC)
            undo.callback(os.close, self._wake)
            # An epoll forgets descriptors that are closed: none is mistaken for a later one of the same number.
            self._epoll = undo.enter_context(select.epoll(flags=select.EPOLL_CLOEXEC))
            for fd in (self._wake, *self._pidfds, *self._outputs):
                self._epoll.register(fd, select.EPOLLIN)
            self._held = undo.pop_all()
        self._thread = threading.Thread(target=self._run, name="parallel-dit-watcher", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Tell the thread to end; call once, from any thread."""
        self._on_death = _nothing  # what it calls may hold this set, and with it its segments' memory
        os.eventfd_write(self._wake, 1)

    def join(self) -> None:
        """Wait until the thread has ended. Do not hold what `on_death` waits for."""
        self._thread.join()

    def _run(self) -> None:
        with self._held:
            died = False
            while True:
                ready = {fd for fd, _ in self._epoll.poll()}
                if self._wake in ready:
                    return
                for fd in ready & self._outputs.keys():
                    if not self._outputs[fd].drain():
                        self._forget(fd)
                if not died and ready & self._pidfds:
                    died = True
                    for fd in self._pidfds:
                        self._forget(fd)
                    self._on_death()

    def _forget(self, fd: int) -> None:
        try:
            self._epoll.unregister(fd)
        except OSError:
            return  # closed meanwhile, so the epoll has forgotten it already


def _nothing() -> None:
    """What a death means to a watcher that has been stopped."""


AnyRank: TypeAlias = RankProcess | RemoteRank
STOP_S = 2.0  # how long idle ranks get to end by themselves

_log = logging.getLogger(__name__)


class RankSet:
    """All ranks of one start, in rank order."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.ended = False
        self.ranks: list[AnyRank] = []
        self.remote: RemoteRanks | None = None
        self.segments: SegmentTable
        self.watcher: Watcher
        self._epoll: select.epoll
        self._held = ExitStack()

    @property
    def machines(self) -> list[Machine]:
        """The further machines that have a part in it, in the order of their ranks."""
        return [] if self.remote is None else self.remote.machines

    @property
    def devices_by_machine(self) -> tuple[int, ...]:
        """How many ranks each machine has, ours first."""
        further = [len(machine.devices) for machine in self.machines]
        return (len(self.ranks) - sum(further), *further)

    def _start(
        self,
        settings: RankSettings,
        segment_bytes: int,
        *,
        machines: Sequence[Machine],
        deadline_s: float,
        announce: Callable[[Attach, int], None],
        on_death: Callable[[], None],
    ) -> None:
        """Start all ranks; `announce` is to hand them their first segment. Raises OSError; `end` ends what there is.

        Machines have `deadline_s` for their ranks to start. Raises PoolError for one that is lost.
        """
        with ExitStack() as used:
            store = None
            remote = RemoteRanks(machines, settings)
            if remote.machines:
                self.remote, settings = remote, remote.meet(settings)
            else:
                store = os.memfd_create("parallel-dit-store", os.MFD_CLOEXEC)
                used.callback(os.close, store)
                os.fchmod(store, 0o600)
            segment, segment_fd = Segment.create(segment_bytes)
            used.callback(os.close, segment_fd)
            self.segments = SegmentTable(segment)
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
            announce(Attach(segment=0, num_bytes=segment_bytes, drop=()), segment_fd)

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

    def end(self) -> None:
        """Kill and reap all ranks, and close everything. Views of our segments stay valid; NCCL's in /dev/shm go."""
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
