"""Work in threads that no process waits for: Python joins those of an executor at its end, so Ctrl-C would wait for it.

Owns the threads. Does not own what they do, nor that it ends.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_daemons(works: Sequence[Callable[[], T]], *, at_once: int) -> list[Future[T]]:
    """The future of each, in order. So many run at once; one that is cancelled before it runs never does."""
    futures = [Future[T]() for _ in works]
    left = deque(zip(works, futures, strict=True))

    def run() -> None:
        while left:
            try:
                work, future = left.popleft()
            except IndexError:  # another thread took the last one
                return
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:  # noqa: BLE001  the future raises it where it is asked for
                    future.set_exception(error)

    for _ in range(min(at_once, len(works))):
        threading.Thread(target=run, name="parallel-dit", daemon=True).start()
    return futures
