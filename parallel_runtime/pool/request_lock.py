"""Who may ask the pool when: one request at a time, from any thread; the others wait and may give up waiting."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

WAIT_S = 0.05


class RequestLock:
    """One at a time. `lock` is for those who cannot give up."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._owner: int | None = None  # the thread inside the lock

    @property
    def taken(self) -> bool:
        """Whether somebody has the lock. Never waits."""
        return self.lock.locked()

    @contextmanager
    def acquire(self, check_cancelled: Callable[[], None] | None) -> Iterator[Callable[[], None]]:
        """Wait for the lock. Yields what to call now and then meanwhile.

        Raises whatever `check_cancelled` raises, and `RuntimeError` when this thread has the lock already.
        """
        check: Callable[[], None] = check_cancelled or _go_on
        if self._owner == threading.get_ident():
            raise RuntimeError("the pool was called from a callback of its own request; call it after the request")
        while not self.lock.acquire(timeout=WAIT_S):
            check()
        self._owner = threading.get_ident()
        try:
            yield check
        finally:
            self._owner = None
            self.lock.release()


def _go_on() -> None:
    """What a request that nobody cancels calls now and then."""
