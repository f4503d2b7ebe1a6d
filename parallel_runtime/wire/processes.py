"""Signs of a process: its pulse shows that it runs, and what it prints is read.

Owns the pulse and the last lines of output. That it ends with its parent is lifeline.py's.
"""

import os
import threading
import time
from pathlib import Path

from .channel import SegmentTable

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
