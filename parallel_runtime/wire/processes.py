"""A process beside its parent: it ends with it, shows that it runs, and what it prints is read.

Owns the lifeline, the pulse and the last lines of output. Knows no message.
"""

import fcntl
import os
import select
import signal
import threading
import time
from pathlib import Path

from .channel import SegmentTable


def arm(pipe_fd: int, parent_pid: int) -> None:
    """Tie this process, and what it starts, to `parent_pid` and to the pipe's read end `pipe_fd`, which stays open.

    To be called in a process that leads its process group, as the pool starts it. Returns only while the parent lives.
    """
    fcntl.fcntl(pipe_fd, fcntl.F_SETOWN, -os.getpid())  # negative: the group
    fcntl.fcntl(pipe_fd, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe_fd, fcntl.F_SETFL, fcntl.fcntl(pipe_fd, fcntl.F_GETFL) | os.O_ASYNC)
    try:
        parent_fd = os.pidfd_open(parent_pid)
    except ProcessLookupError:
        _die()
    watch = select.poll()
    watch.register(parent_fd, select.POLLIN)
    watch.register(pipe_fd, 0)  # a hang-up is always reported
    # The parent may have gone before its going could signal us, and its number may be another's by now.
    if watch.poll(0) or os.getppid() != parent_pid:
        _die()
    threading.Thread(target=_wait, args=(watch,), name="lifeline", daemon=True).start()


def _wait(watch: select.poll) -> None:
    watch.poll()
    _die()


def _die() -> None:
    os.killpg(os.getpid(), signal.SIGKILL)


PULSE_S = 0.25  # between two of a rank
PASSED_ON_S = 1.0  # between two of a rank of a further machine, which travel
LEAST_S = 3.0  # no process that runs misses its pulse for so long, however busy its machine is


def start_pulse(segments: SegmentTable, rank: int) -> threading.Thread:
    """Have a thread show the pulse of `rank` until the process ends. Only that rank calls this."""

    def run() -> None:
        while True:
            segments.show_pulse(rank)
            time.sleep(PULSE_S)

    thread = threading.Thread(target=run, name="parallel-dit-pulse", daemon=True)
    thread.start()
    return thread


def is_stopped(pid: int) -> bool:
    """Whether a signal (SIGSTOP, a debugger) holds the process; False when there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in "Tt"


TAIL_BYTES = 8 * 1024


class Output:
    """The last of what a rank printed, read as it comes so that the rank never waits. Safe to use from two threads."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._tail = bytearray()
        self._lock = threading.Lock()
        self._open = True

    def fileno(self) -> int:
        """The pipe's descriptor, for polling."""
        return self._fd

    def drain(self) -> bool:
        """Read what is there. False when nothing more will come."""
        with self._lock:
            for _ in range(16):  # a rank that prints without end must not hold the reader here
                try:
                    chunk = os.read(self._fd, 1 << 16) if self._open else b""
                except BlockingIOError:
                    return True
                if not chunk:
                    return False
                self._tail += chunk
                del self._tail[:-TAIL_BYTES]
            return True

    def text(self) -> str:
        """At most the last 8 KiB."""
        with self._lock:
            return self._tail.decode("utf-8", errors="replace").strip()

    def close(self) -> None:
        with self._lock:
            if self._open:
                self._open = False
                os.close(self._fd)
