"""Temporary folders that outlive no process for long: what was killed leaves one, which the next to make one removes.

A folder has a file that its process keeps locked (flock(2)); the kernel frees the lock however the process ends, and
also where process ids are another container's. A folder without such a file is left alone.
"""

import os
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

PREFIX = "parallel-dit-"
LOCKED = "locked"  # the file's name


class TemporaryFolder:
    """A new folder at `path`, until `cleanup` or the end of this process. Raises OSError where none can be made."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True)
        self.path = Path(self._folder.name)
        self._lock = _locked(self.path)
        remove_left()

    def cleanup(self) -> None:
        """Remove it with all that is in it. An open file would stay on NFS, by another name."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        self._folder.cleanup()


def remove_left() -> None:
    """Remove the folders that are this user's and whose processes have ended; never raises OSError."""
    import fcntl  # here: Windows has none

    with suppress(OSError):
        for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            with suppress(OSError):  # it is locked, has no such file, is another user's, or is gone meanwhile
                status = folder.lstat()
                if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                    continue
                lock = os.open(folder / LOCKED, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder)
                finally:
                    os.close(lock)


def _locked(folder: Path) -> int | None:
    """The folder's locked file, which gets its name once it is locked; None where files cannot be locked."""
    import fcntl

    lock = os.open(new := folder / "new", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        new.rename(folder / LOCKED)
    except OSError:  # as on some network file systems
        os.close(lock)
        new.unlink()
        return None
    return lock
