"""A rank must not outlive the process that started it, however that ends.

Owns the two ties to the parent. Does not own the ordinary way to stop (a STOP message, worker/entry.py).
`python -m parallel_runtime.process.lifeline PIPE_FD PARENT_PID MODULE ARGUMENT...` runs any module so.

1. A pipe whose write end only the parent holds, close-on-exec. When the parent exits, is killed or replaces itself with
   `execv`, the kernel hangs the pipe up and, asked by `O_ASYNC` and `F_SETSIG`, kills this process and what it started.
   No Python code runs, so a thread that holds the interpreter lock in a kernel cannot delay it.
2. A thread that waits for the parent's pidfd. It covers a write end that leaked into another child of the parent.

`PR_SET_PDEATHSIG` is neither: it follows the thread that started us, which ComfyUI may end, and misses `execv`.
"""

import fcntl
import os
import runpy
import select
import signal
import sys
import threading

from ..kernel_calls import pidfd_open


def arm(pipe_fd: int, parent_pid: int) -> None:
    """Tie this process, and what it starts, to `parent_pid` and to the pipe's read end `pipe_fd`, which stays open.

    To be called in a process that leads its process group, as the pool starts it. Returns only while the parent lives.
    """
    fcntl.fcntl(pipe_fd, fcntl.F_SETOWN, -os.getpid())  # negative: the group
    fcntl.fcntl(pipe_fd, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe_fd, fcntl.F_SETFL, fcntl.fcntl(pipe_fd, fcntl.F_GETFL) | os.O_ASYNC)
    try:
        parent_fd = pidfd_open(parent_pid)
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


def main() -> None:
    """Run a module as `python -m` does, tied to the process that started this one."""
    pipe_fd, parent_pid, module = sys.argv[1:4]
    arm(int(pipe_fd), int(parent_pid))
    del sys.argv[:3]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
