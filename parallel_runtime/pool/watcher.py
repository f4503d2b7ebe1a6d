"""A thread that looks after the ranks while nobody asks them anything.

Owns reading what ranks print, so that none ever waits for a reader, and noticing a death between requests. Does not decide
anything: it calls back, and whoever is called takes the pool's lock first. While a request runs, the thread that made it
watches for itself (supervisor.py).
"""

import os
import select
import threading
from collections.abc import Callable, Sequence

from .process import RankProcess


class Watcher:
    """Watches `ranks` from its start until `stop`; calls `on_death` once, in its own thread, when one of them ends."""

    def __init__(self, ranks: Sequence[RankProcess], *, on_death: Callable[[], None]) -> None:
        self._outputs = {rank.output.fileno(): rank.output for rank in ranks}
        self._pidfds = [rank.pidfd for rank in ranks]
        self._on_death = on_death
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        # An epoll forgets descriptors that are closed, so none can be mistaken for a later one of the same number.
        self._epoll = select.epoll(flags=select.EPOLL_CLOEXEC)
        for fd in (self._wake, *self._pidfds, *self._outputs):
            self._epoll.register(fd, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="parallel-dit-watcher", daemon=True)

    def start(self) -> None:
        """Begin. A watcher that was never started needs no `stop`, only `release`."""
        self._thread.start()

    def stop(self) -> None:
        """Tell the thread to end, once and from any thread; it releases what it holds by itself."""
        os.eventfd_write(self._wake, 1)
