"""The control groups (cgroups(7)) that the memory and the time of this process count in: of its container, of its
systemd unit, of its Slurm job. A group's limit holds for the groups inside it, too.

Owns where they lie. What a file of a group says is read by those who ask.
"""

import math
import os
import re
from contextlib import suppress
from pathlib import Path, PurePosixPath

CONTROL_GROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
# By version: the line of `OWN` that has the process's group, of memory or another resource.
LINES = {1: r"^\d+:(?:[^:\n]*,)?{}(?:,[^:\n]*)?:(/.*)$", 2: r"^0::(/.*)$"}


def groups_of(resource: str, version: int) -> list[Path]:
    """Of "memory" or "cpu", the folders of this process's group and of those around it, its own first.

    Some may not be there: a container sees its own group as the outermost, and may be told the machine's path of it.
    """
    own = ""
    with suppress(OSError):
        own = os.fsdecode(OWN.read_bytes())
    found = re.search(LINES[version].format(resource), own, re.MULTILINE)
    names = PurePosixPath(found[1]).parts[1:] if found is not None else ()
    if ".." in names:  # outside of what is seen here
        names = ()
    outermost = CONTROL_GROUPS / resource if version == 1 else CONTROL_GROUPS
    return [outermost.joinpath(*names[:depth]) for depth in range(len(names), -1, -1)]


def most_cpus() -> float:
    """How many CPUs' time this process may take at most, by the least quota of its groups; infinite without one."""
    most = math.inf
    for group in groups_of("cpu", 2):
        with suppress(OSError, ValueError):  # no such group, or "max"
            quota_us, period_us = map(int, (group / "cpu.max").read_text().split())
            most = min(most, quota_us / period_us)
    for group in groups_of("cpu", 1):
        with suppress(OSError):
            quota_us, period_us = (int((group / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
            most = min(most, quota_us / period_us if quota_us > 0 else math.inf)
    return most
