"""How much memory processes take while something happens, as the kernel counts it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil


def private_bytes(pid: int) -> int:
    """What would be free if the process ended."""
    return psutil.Process(pid).memory_full_info().uss


@contextmanager
def peak_growth(pids: list[int]) -> Iterator[list[int]]:
    """The most private memory each process had in the block, less what it had before; filled when it ends."""
    before = [private_bytes(pid) for pid in pids]
    peak = list(before)
    growth: list[int] = []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            peak[:] = [max(old, private_bytes(pid)) for old, pid in zip(peak, pids, strict=True)]

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield growth
    finally:
        done.set()
        thread.join()
    growth.extend(new - old for new, old in zip(peak, before, strict=True))
