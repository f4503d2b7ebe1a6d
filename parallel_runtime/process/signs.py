"""Signs of a process: its pulse shows that it runs, and what it prints is read.

Owns the pulse and the last lines of output. That it ends with its parent is lifeline.py's.
"""

import os
import re
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

from ..wire.channel import SegmentTable
from .control_groups import groups_of

PULSE_S = 0.25  # between two of a rank
PASSED_ON_S = 1.0  # between two of a rank of a further machine, which travel
VMSTAT = Path("/proc/vmstat")
OUT_OF_MEMORY = "killed by SIGKILL as host memory ran out"
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
    return _stat(pid)[:1] in (["T"], ["t"])


def memory_kills() -> int:
    """How many processes the system has killed so far because its memory, or a limit of it, ran out.

    Of this process's control group, or of the next one around it that counts them, else of the machine (proc(5)); 0
    where none is said.
    """
    for counts in (*(group / "memory.events" for group in groups_of("memory", 2)), VMSTAT):
        with suppress(OSError):
            if (found := re.search(r"^oom_kill (\d+)$", counts.read_text(encoding="ascii"), re.MULTILINE)) is not None:
                return int(found[1])
    return 0


def killed_by(number: int, *, kills_before: int | None = None) -> str:
    """ "killed by SIGKILL"; a signal without a name by its number.

    `kills_before`: what `memory_kills` was when the process started; where it has grown, memory is the reason.
    """
    if number == signal.SIGKILL and kills_before is not None and memory_kills() > kills_before:
        return OUT_OF_MEMORY
    try:
        return f"killed by {signal.Signals(number).name}"
    except ValueError:
        return f"killed by signal {number}"


class ProcessWork:
    """What a process has done so far, which tells whether it gets on while it cannot show a pulse: it imports."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._done: tuple[str, ...] = ()

    def gets_on(self) -> bool:
        """Whether it has computed, or read a file or a page of one, since this was asked last."""
        before, self._done = self._done, _work(self._pid)
        return self._done != before


def _work(pid: int) -> tuple[str, ...]:
    """Its page faults, its clock ticks on processors, the bytes that it has read where the system tells (proc(5)); ()
    when there is none."""
    faults_and_ticks, read = _stat(pid)[7:15], []
    with suppress(OSError):  # some kernels do not count it, and some containers do not say
        read = [Path(f"/proc/{pid}/io").read_text(encoding="ascii").partition("\n")[0]]
    return (*read, *faults_and_ticks)


def _stat(pid: int) -> list[str]:
    """What the system says of a process, from its state on (the third field of proc(5)); nothing when there is none."""
    with suppress(OSError):
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return text.rpartition(")")[2].split()
    return []


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
