"""Ranks with pretend devices, forked from a process that has imported torch and what ComfyUI imports.

A part of this target starts some hundred ranks. Importing these anew costs each of them 8 s of a core, a fork a few
milliseconds. What comes after them is a rank's own: its descriptors, environment, path and group, the pretend device,
the simulated NCCL, ComfyUI, and the product too where it runs from a copy. The parent computes with one thread, so that
no thread that a fork leaves behind is missed, and never has the device itself; a rank on a CPU has not either.
"""

import gc
import importlib
import itertools
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import torch

import parallel_runtime.worker.engine  # noqa: F401  what ranks import, imported once
from host.forked_ranks import FOR_COMFYUI, MORE
from parallel_runtime.pool import process

OWN = ("pretend_cuda", "nccl_rules")  # modules that a rank imports itself, whatever this process has
PRODUCT = "parallel_runtime"
MOST_FDS = 1 << 16
LEFT_BEHIND: list[object] = []  # the parent's modules, which nothing may take apart in a rank


class Forked:
    """As much of `subprocess.Popen` as the pool uses, for the command line of a rank."""

    def __init__(
        self, command: Sequence[str], *, stdout: int, pass_fds: Sequence[int], env: Mapping[str, str], **_: object
    ) -> None:
        sys.stdout.flush()
        self.returncode: int | None = None
        self.pid = os.fork()
        if not self.pid:
            _become_rank(command, stdout, pass_fds, env)
        with suppress(OSError):  # it has done so itself, or is gone
            os.setpgid(self.pid, self.pid)

    def kill(self) -> None:
        """SIGKILL."""
        os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Its status, once it has ended. Raises `TimeoutExpired`."""
        deadline = time.monotonic() + (3600.0 if timeout is None else timeout)
        while self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a forked rank", timeout or 0.0)
            else:
                time.sleep(0.002)
        return self.returncode


class _Starting:
    """What the pool's process.py takes from `subprocess`."""

    Popen, DEVNULL, TimeoutExpired = Forked, subprocess.DEVNULL, subprocess.TimeoutExpired


def fork_ranks() -> None:
    """Have this process's pools fork their ranks from now on."""
    for name in FOR_COMFYUI[MORE].split():
        importlib.import_module(name)
    torch.set_num_threads(1)
    process.subprocess = _Starting  # type: ignore[assignment]


def _become_rank(command: Sequence[str], stdout: int, pass_fds: Sequence[int], env: Mapping[str, str]) -> NoReturn:
    """Run the module that the command line names as a fresh interpreter would, as far as a rank can tell."""
    try:
        os.setpgid(0, 0)
        gc.freeze()  # or a socket of the parent's is collected here and closes what has its number by then
        for fd, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, stdout), (2, stdout)):
            os.dup2(source, fd)
        for below, above in itertools.pairwise((*sorted({0, 1, 2, *pass_fds}), MOST_FDS)):
            os.closerange(below + 1, above)
        os.environ.clear()
        os.environ.update(env)
        if any(word.startswith("--device=cuda") for word in command):
            _install_device(env["PYTHONPATH"].split(os.pathsep))
        name = command.index("-m") + 1
        sys.argv = list(command[name:])
        runpy.run_module(command[name], run_name="__main__", alter_sys=True)
    finally:  # a rank leaves the process itself
        traceback.print_exc()
        os._exit(1)


def with_device(run: Callable[[], str]) -> str:
    """What `run` returns in a process of its own that has the pretend device, as the host's would; "" if it fails."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        try:
            gc.freeze()
            _install_device([str(Path(__file__).resolve().parents[1])])
            os.write(writing, run().encode())
        finally:
            if sys.exc_info()[0] is not None:
                traceback.print_exc()
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as answer:
        said = answer.read().decode()
    os.waitpid(pid, 0)
    return said


def _install_device(path: Sequence[str]) -> None:
    _import_anew(path)
    from pretend_cuda import device  # type: ignore[import-not-found]  # on the path since this moment

    device.install()


def _import_anew(path: Sequence[str]) -> None:
    """Search `path` first, a copy of the product before the product, and forget what must come from there."""
    copies = [place for place in path[1:] if (Path(place) / PRODUCT).is_dir()]
    sys.path[:0] = [*copies, *path]
    own = (*OWN, PRODUCT) if copies else OWN
    for name in [name for name in sys.modules if name.partition(".")[0] in own]:
        LEFT_BEHIND.append(sys.modules.pop(name))
