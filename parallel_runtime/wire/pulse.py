"""Whether the process of a rank runs at all, whatever it does.

Owns the thread with which a rank shows it, and how the state of a process is read. Does not own the shared word
(channel.py), nor what follows from silence (pool/supervisor.py).

The pulse differs from the heartbeat: the heartbeat says that a rank gets on with a request, and stops while it waits
for a disk or for other ranks. The pulse goes on then, and stops where a signal holds the process, where a thread never
returns to the interpreter, and where its machine is gone.
"""

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
