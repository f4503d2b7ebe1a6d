"""The segments that NCCL keeps in /dev/shm: which there are, which processes hold them, and removing those that our
ranks leave.

NCCL names them nccl-XXXXXX and unlinks each once both its ranks have it; one whose ranks end before that stays until
the machine restarts. A name does not tell whose it is, so only those are removed that a rank of this pool has mapped.
Does not own the pool's own segments: they are memfds (channel.py) and leave nothing.
"""

import os
import re
import stat
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path("/dev/shm")  # noqa: S108  NCCL's choice, which cannot be changed
_NAME = r"nccl-\w+"
_MAPPED = re.compile(rf" ({re.escape(str(FOLDER))}/{_NAME})$", re.MULTILINE)  # without "(deleted)"


@dataclass(frozen=True)
class Leftover:
    """A segment that no process of this user has mapped."""

    path: Path
    num_bytes: int


def mapped_segments(pid: int) -> set[Path]:
    """The segments of NCCL that a process has mapped and that still have a name; empty when it is gone or not ours."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return set()
    return {Path(found) for found in _MAPPED.findall(maps)}


def segments_of(pids: Iterable[int]) -> set[Path]:
    """What the processes have mapped, together. Costs nothing where NCCL has left no file."""
    if next(FOLDER.glob("nccl-*"), None) is None:
        return set()
    return {path for pid in pids for path in mapped_segments(pid)}


def remove(segments: set[Path]) -> None:
    """Unlink them. One that is gone meanwhile, or that the system does not let go, is left to the doctor."""
    for path in segments:
        with suppress(OSError):
            path.unlink()


def leftovers(folder: Path = FOLDER) -> list[Leftover]:
    """The segments of this user that none of its processes has mapped. Processes of other containers are not seen."""
    ours = {}
    for path in folder.glob("nccl-*"):
        with suppress(OSError):  # gone meanwhile
            status = path.lstat()
            # What others may have named or linked there is not for a command that people paste.
            if re.fullmatch(_NAME, path.name) and stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid():
                ours[path] = status.st_size
    if not ours:
        return []
    held: set[Path] = set()
    for process in Path("/proc").glob("[0-9]*"):
        held |= mapped_segments(int(process.name))
    return [Leftover(path, size) for path, size in sorted(ours.items()) if path not in held]
