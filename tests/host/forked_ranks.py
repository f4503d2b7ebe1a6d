"""Ranks that are forked from a process which has imported torch: to import it costs each rank 2 s of a core.

`fork_ranks()` has this process start the ranks of its pools so from then on, where the system allows it; everything
else that it starts, it starts as before. A forked rank runs the command line that the pool wrote, as a fresh
interpreter would: its descriptors, environment, folder, session and command line are its own, and it is a child of the
process that asked, not of the one that it was forked from. Tests of how ranks start and end do without. A forked rank
takes the sizes that a file tells (told_sizes.py).

`python -m host.forked_ranks FD` is the process that forks; it ends when the other end of its socket FD closes.
"""

from __future__ import annotations

import array
import ctypes
import gc
import importlib
import itertools
import json
import os
import platform
import runpy
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

ENTRY = "parallel_runtime.worker.entry"
ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
CLONE_PARENT, SIGCHLD, SYS_CLONE = 0x8000, 17, 56
THREAD_BYTES = 2048  # of glibc's record of a thread, in which it keeps the thread's number
MOST_BYTES, MOST_FDS = 1 << 16, 64
ROOM = 2048  # for a rank's command line
# A variable that names modules to import as well before ranks are forked, and those that ComfyUI's modules import: of
# the 4 s that a rank would take for them, 3 s are these.
MORE = "FORK_RANKS_WITH"
FOR_COMFYUI = {MORE: "torch._dynamo transformers torchvision scipy.integrate einops comfy_kitchen"}
HERE = sys.platform == "linux" and platform.machine() == "x86_64"

enabled = False


class _Forking:
    """The process that forks, started when the first rank is."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._pid = 0
        self._lock = threading.Lock()
        self.environment: Mapping[str, str] = {}  # of the process that forks, beside this one's

    def fork(self, command: list[str], settings: dict[str, Any]) -> int:
        """The process id of a rank with that command line."""
        fds = [settings["stdout"], *settings["pass_fds"]]
        order = {"command": command, "env": settings["env"], "cwd": str(settings["cwd"]), "fds": fds}
        with self._lock:
            there = self._ready()
            there.sendmsg([json.dumps(order).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
            answer = there.recv(64)
        if not answer:
            raise OSError("the process that forks ranks has ended")
        return int(answer)

    def _ready(self) -> socket.socket:
        if self._socket is None or self._pid != os.getpid():
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            environment = {**os.environ, **self.environment, "OMP_NUM_THREADS": "1"}
            environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{TESTS}"
            PLAIN_POPEN(
                [sys.executable, "-u", "-m", "host.forked_ranks", str(theirs.fileno()), "-" * ROOM],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                cwd=ROOT,
                env=environment,
            )
            theirs.close()
            self._socket, self._pid = ours, os.getpid()
        return self._socket


PLAIN_POPEN = subprocess.Popen
FORKING = _Forking()


class Popen(PLAIN_POPEN):  # type: ignore[misc,type-arg]
    """`subprocess.Popen`; a rank's command line is forked while `enabled`."""

    def __init__(self, args: Any, *more: Any, **settings: Any) -> None:
        ours = isinstance(args, list) and ENTRY in args and Path(settings.get("cwd") or "").resolve() == ROOT
        if not (enabled and ours):  # a copy of the pack has its own modules
            super().__init__(args, *more, **settings)
            return
        self.args, self.returncode = args, None
        self.stdin = self.stdout = self.stderr = None
        self.encoding = self.errors = self.text_mode = None
        self._waitpid_lock = threading.Lock()
        self._child_created = False
        self.pid = FORKING.fork(args, settings)
        self._child_created = True


def fork_ranks(environment: Mapping[str, str] = MappingProxyType({})) -> None:
    """Have this process fork the ranks of its pools, unless START_EACH_RANK is in its environment.

    `environment`: further variables of the process that forks them, such as FOR_COMFYUI.
    """
    global enabled  # noqa: PLW0603  a switch of the tests' own
    FORKING.environment = environment
    enabled = HERE and "START_EACH_RANK" not in os.environ
    subprocess.Popen = Popen  # type: ignore[misc]


def start_ranks() -> None:
    """Have this process start its ranks again as the pool does."""
    global enabled  # noqa: PLW0603
    enabled = False


def serve(fd: int) -> None:
    """Import what every rank imports, then fork one for each order until nobody can send one."""
    import torch.distributed

    import parallel_runtime.worker.engine  # noqa: F401

    from .told_sizes import tell_sizes_when_imported

    for name in os.environ.get(MORE, "").split():
        importlib.import_module(name)
    torch.set_num_threads(1)
    tell_sizes_when_imported()
    gc.collect()
    gc.freeze()  # or a collection in a rank copies every page
    orders = socket.socket(fileno=fd)
    number = _thread_number()
    room = _command_line()
    while True:
        data, fds, _, _ = socket.recv_fds(orders, MOST_BYTES, MOST_FDS)
        if not data:
            return
        pid = ctypes.PyDLL(None).syscall(SYS_CLONE, CLONE_PARENT | SIGCHLD, 0, 0, 0, 0)
        if pid == 0:
            number.value = os.getpid()  # as fork() of the C library would, which knows no CLONE_PARENT
            ctypes.pythonapi.PyOS_AfterFork_Child()
            _become_rank(json.loads(data), fds, room)
        for each in fds:
            os.close(each)
        orders.send(str(pid).encode())


def _thread_number() -> ctypes.c_int:
    """Where the C library keeps this thread's number."""
    ctypes.CDLL(None).pthread_self.restype = ctypes.c_void_p
    library = ctypes.CDLL(None)
    library.pthread_self.restype = ctypes.c_void_p
    start = library.pthread_self()
    for offset in range(0, THREAD_BYTES, 4):
        found = ctypes.c_int.from_address(start + offset)
        if found.value == os.getpid():
            return found
    raise RuntimeError("the C library keeps a thread's number elsewhere; tests must start ranks one by one")


def _command_line() -> tuple[int, int]:
    """Where this process's command line lies, from and to."""
    fields = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return int(fields[45]), int(fields[46])


def _become_rank(order: dict[str, Any], fds: list[int], room: tuple[int, int]) -> NoReturn:
    """Run the module that the command line names as a fresh interpreter would, as far as a rank can tell."""
    try:
        os.setsid()
        _place(fds, [1, *order["fds"][1:]])
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(1, 2)
        for below, above in itertools.pairwise((*sorted({0, 1, 2, *order["fds"][1:]}), 1 << 16)):
            os.closerange(below + 1, above)
        os.environ.clear()
        os.environ.update(order["env"])
        os.chdir(order["cwd"])
        line = b"\0".join(part.encode() for part in order["command"])[: room[1] - room[0] - 1]
        ctypes.memmove(room[0], line.ljust(room[1] - room[0], b"\0"), room[1] - room[0])
        sys.path[:] = [*order["env"]["PYTHONPATH"].split(os.pathsep), *(path for path in sys.path if _is_library(path))]
        name = order["command"].index("-m") + 1
        sys.argv = list(order["command"][name:])
        runpy.run_module(order["command"][name], run_name="__main__", alter_sys=True)
    finally:  # a rank leaves the process itself
        traceback.print_exc()
        os._exit(1)


def _place(fds: list[int], numbers: list[int]) -> None:
    """Give the descriptors the numbers that the command line says, none of them over another."""
    above = [os.dup(fd) for fd in fds]
    while min(above) <= max(numbers):  # dup gives the lowest free one
        above = [os.dup(fd) for fd in above]
    for fd, number in zip(above, numbers, strict=True):
        os.dup2(fd, number, inheritable=True)


def _is_library(path: str) -> bool:
    return bool(path) and not path.startswith(str(ROOT)) or ".venv" in path


if __name__ == "__main__":
    serve(int(sys.argv[1]))
