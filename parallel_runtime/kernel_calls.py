"""Calls of Linux that a Python may lack: those of uv, for one, are built for a C library from before they came.

Owns memfds, pidfds and the numbers that go with them, which are the same on every processor. Does not own what they are
used for.
"""

import ctypes
import os
from functools import cache

MFD_CLOEXEC, MFD_ALLOW_SEALING = 1, 2  # linux/memfd.h
F_ADD_SEALS, F_GET_SEALS = 1033, 1034  # linux/fcntl.h
F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW = 1, 2, 4
P_PIDFD = 3  # linux/wait.h
_PIDFD_OPEN = 434  # asm-generic/unistd.h; glibc has a function of that name from 2.36 on alone


def memfd_create(name: str, flags: int) -> int:
    """A descriptor of memory without a name (memfd_create(2)). Raises OSError."""
    return _descriptor(_library().memfd_create(name.encode(), flags))


def pidfd_open(pid: int) -> int:
    """A descriptor of a process, not inherited (pidfd_open(2)). Raises ProcessLookupError for none, and OSError."""
    return _descriptor(_library().syscall(_PIDFD_OPEN, pid, 0))


@cache
def _library() -> ctypes.CDLL:
    """The C library, loaded late, since the pack's modules must import on systems without it."""
    return ctypes.CDLL(None, use_errno=True)


def _descriptor(returned: int) -> int:
    if returned < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return returned
