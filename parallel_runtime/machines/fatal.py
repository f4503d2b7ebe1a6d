"""A process that is worth nothing without any of its threads: whatever goes wrong in one of them ends it, in words.

The relay (relay.py) and the launcher (launch.py) are such processes. Owns how they begin and end; the process that
started them sees the end, and what they printed.
"""

import os
import threading
import traceback
from collections.abc import Callable
from typing import NoReturn

import torch

from ..process import lifeline


def run_process(serve: Callable[[], None], *, lifeline_fd: int, parent_pid: int) -> NoReturn:
    """Run `serve` to its end, and then end this process, which does not outlive its parent."""
    lifeline.arm(lifeline_fd, parent_pid)
    torch.set_num_threads(1)
    fatal(serve)
    os._exit(0)


def thread(run: Callable[[], None]) -> threading.Thread:
    """Run it in a thread, which is returned; an exception there ends the process."""
    started = threading.Thread(target=fatal, args=(run,), daemon=True)
    started.start()
    return started


def fatal(run: Callable[[], None]) -> None:
    """Run it; an exception is printed and ends the process."""
    try:
        run()
    except BaseException:  # noqa: BLE001  printed, and the process ends
        traceback.print_exc()
        os._exit(1)
