"""What every measured interpreter does at its start: it notes its lines under the test that runs meanwhile.

A rank's environment is written out by the pool, so no variable tells it which test runs: a process looks for the file
of the pytest that it descends from (measured_tests.py writes it). Servers and pools live through many tests: a thread
follows the file. What ran before a test ended is saved then, though the process be killed later.
"""

import ctypes
import os
import sys
import threading
from pathlib import Path

import coverage

FOLDER = Path(__file__).resolve().parents[1] / "build" / "coverage"
RUNNING = FOLDER / "running"
LOADED = Path(__file__).resolve().parent / "comfy" / "loaded_comfyui.py"
FORKS = {"host.forked_ranks", "models.ranks", str(LOADED)}  # what they fork calls `follow`
IN_MOVED_TO = 0x80  # of <sys/inotify.h>: a file was put in another's place
EVENTS_BYTES = 64 * 1024


def start(settings: str) -> None:
    """Measure this process from now on, with these settings of coverage's, under the name of its pytest's test."""
    os.environ["COVERAGE_PROCESS_START"] = settings
    coverage.process_startup()
    del os.environ["COVERAGE_PROCESS_START"]  # before anything else looks at the environment
    if not FORKS & {*sys.orig_argv}:  # what forks has no threads: what is forked could wait for ever for their locks
        follow()


def follow() -> None:
    """Note what this process runs under the test that its pytest runs meanwhile, if it descends from one."""
    note = _note_of_an_ancestor()
    if note is not None:
        switch(_said(note))
        threading.Thread(target=_follow, args=(note,), daemon=True).start()


def _note_of_an_ancestor() -> Path | None:
    """The file in which the nearest pytest above says which test it runs; None for pytest itself."""
    pid = os.getppid()
    while pid > 1:
        if (note := RUNNING / str(pid)).exists():
            return note
        pid = int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
    return None


def _follow(note: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    changes = libc.inotify_init1(os.O_CLOEXEC)
    if libc.inotify_add_watch(changes, bytes(note.parent), IN_MOVED_TO) < 0:
        raise OSError(ctypes.get_errno(), f"{note.parent} cannot be watched: raise fs.inotify.max_user_instances")
    before = ""
    while True:
        if (said := _said(note)) != before:
            switch(before := said)
        os.read(changes, EVENTS_BYTES)


def _said(note: Path) -> str:
    return note.read_text(encoding="utf-8")


def switch(test: str) -> None:
    """Note what this process runs under that test from now on, if it is measured."""
    if (measuring := coverage.Coverage.current()) is not None:
        measuring.switch_context(test)
