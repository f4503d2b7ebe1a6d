"""A thread that looks after the ranks while nobody asks them anything.

Owns reading what ranks print, so that none ever waits for a reader, and noticing a death between requests. Decides
nothing: it calls back, and whoever is called takes the pool's lock first. While a request runs, the thread that made it
watches for itself (supervisor.py).
"""

import os
import select
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from .process import RankProcess
from .remote_ranks import RemoteRank


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
        self._on_death = _nothing  # whom it calls may hold us, and all of it its segments' memory
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
