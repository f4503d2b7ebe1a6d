"""The ranks of one generation as processes: started together with what they share, and ended together.

Owns the memory that they share, what polls them, and that none is left. Does not own what ranks are asked, nor when
they have failed (supervisor.py), nor one rank's process (process.py).
"""

import logging
import os
import select
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
from .watcher import Watcher

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
