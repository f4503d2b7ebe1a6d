"""The control groups (cgroups(7)) that the memory of this process counts in: of its container, of its systemd unit, of
its Slurm job. A group's limit holds for the groups inside it, too.

Owns where they lie. What a file of a group says is read by those who ask.
"""

import os
import re
from contextlib import suppress
from pathlib import Path, PurePosixPath

CONTROL_GROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
# By version: where the groups of memory lie below `CONTROL_GROUPS`, and the line of `OWN` that has the process's group.
FOLDERS = {1: "memory", 2: ""}
LINES = {1: r"^\d+:(?:[^:\n]*,)?memory(?:,[^:\n]*)?:(/.*)$", 2: r"^0::(/.*)$"}


def memory_groups(version: int) -> list[Path]:
    """The folders of this process's group and of those around it, its own first. Some may not be there: a container
    sees its own group as the outermost one, and may be told the machine's path of it."""
    own = ""
    with suppress(OSError):
        own = os.fsdecode(OWN.read_bytes())
    found = re.search(LINES[version], own, re.MULTILINE)
    names = PurePosixPath(found[1]).parts[1:] if found is not None else ()
    if ".." in names:  # outside of what is seen here
        names = ()
    outermost = CONTROL_GROUPS / FOLDERS[version]
    return [outermost.joinpath(*names[:depth]) for depth in range(len(names), -1, -1)]
