"""What the machine must have for ranks to start: system, packages, shared memory, descriptors, folders, loopback.

Owns the checks that need no device. `/dev/shm` is NCCL's: ours are memfds, which need no folder.
"""

import importlib.metadata
import os
import platform
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from ..devices import missing_system
from ..pool.known_errors import MORE_ROOM
from ..process.nccl_segments import FOLDER, Leftover
from .check import Check

PACKAGES = ("torch", "safetensors", "psutil")
OLDEST_TORCH = (2, 6)
DESCRIPTORS = 256
FREE_BYTES = 64 * 2**20
# NCCL's segment for one direction between two ranks, and how many of them it makes: seen in users' logs of NCCL 2.19 to
# 2.27 with "2 p2p channels". Four ranks in a ring on 64 MiB do not fit, which is what those users reported.
SEGMENT_BYTES = 9_637_888
CHANNELS = 2
# What each rank's proxy of a communicator has there: `sizeof(ncclProxyOpsPool)` of NCCL 2.21.5, in a user's log too.
# Later versions have more of it, or none.
PROXY_BYTES = 7_340_384
# Exchanges and sharded weights have a communicator each, and collectives and messages connections of their own in each.
COMMUNICATORS, RINGS = 2, 2
ADVISED_BYTES = 2**30
# Since when NCCL asks CUDA for host memory in place of segments (its NCCL_CUMEM_HOST_ENABLE is on by default).
MEMORY_ELSEWHERE, DRIVER_ELSEWHERE = [2, 24], 12060


def machine_checks() -> list[Check]:
    """All checks that need no device, in the order of what must be there first; on another system than Linux, which
    lacks what the others look with, that of the system alone."""
    system = _check_system()
    return [system, *(check() for check in _others())] if system.ok else [system]


def _others() -> list[Callable[[], Check]]:
    return [
        _check_torch,
        _check_packages,
        _check_shared_memory,
        _check_descriptors,
        _check_temporary,
        _check_loopback,
    ]


def _check_system() -> Check:
    elsewhere = "workers run on Linux only; on Windows, docs/recipes.md says what to try"
    missing = missing_system()
    return Check(
        name="system",
        ok=missing is None,
        seen=f"{platform.system()} {platform.release()}",
        remedy=missing if missing and sys.platform == "linux" else elsewhere,
    )


def _check_torch() -> Check:
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    return Check(
        name="torch",
        ok=version >= OLDEST_TORCH and dist.is_available(),
        seen=f"{torch.__version__}, distributed {'built in' if dist.is_available() else 'missing'}",
        remedy="install torch 2.6 or newer, a build with torch.distributed",
    )


def _check_packages() -> Check:
    missing = [name for name in PACKAGES if version_of(name) == "missing"]
    return Check(
        name="packages",
        ok=not missing,
        seen="all there" if not missing else f"missing {', '.join(missing)}",
        remedy="pip install -r requirements.txt with ComfyUI's python",
    )


def _check_shared_memory() -> Check:
    from ..wire.channel import Segment

    try:
        _, descriptor = Segment.create(1 << 20)
        os.close(descriptor)
    except (OSError, AttributeError) as error:
        return Check(name="shared memory", ok=False, seen=f"no sealed memfd: {error}", remedy="use Linux 5.4 or newer")
    return Check(name="shared memory", ok=True, seen="sealed memfd works")


def _check_descriptors() -> Check:
    import resource  # here, because Windows has none

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = soft == resource.RLIM_INFINITY
    return Check(
        name="descriptors",
        ok=unlimited or soft >= DESCRIPTORS,
        seen="unlimited" if unlimited else f"{soft} open files allowed",
        remedy=f"raise it to {DESCRIPTORS} or more (ulimit -n 1024)",
    )


def _check_temporary() -> Check:
    remedy = "free some space in the temporary folder, or set TMPDIR to a folder with 64 MiB"
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError as error:  # it has tried to write to each
        return Check(name="temporary folder", ok=False, seen=str(error.strerror), remedy=remedy)
    free = shutil.disk_usage(folder).free
    return Check(
        name="temporary folder",
        ok=os.access(folder, os.W_OK) and free >= FREE_BYTES,
        seen=f"{free / 2**20:,.0f} MiB free",  # not where: people show this to others
        remedy=remedy,
    )


def _check_loopback() -> Check:
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
            listener.bind(("127.0.0.1", 0))
    except OSError as error:
        return Check(name="loopback", ok=False, seen=str(error), remedy="bring up the interface lo (ip link set lo up)")
    return Check(name="loopback", ok=True, seen="127.0.0.1 can be bound; nothing else ever is")


def segment_room_bytes() -> tuple[int, int] | None:
    """(free, all) bytes of /dev/shm; None where there is none."""
    try:
        usage = shutil.disk_usage(FOLDER)
    except OSError:
        return None
    return usage.free, usage.total


def check_segment_room(
    room: tuple[int, int] | None, *, ranks: int, over_host: bool, linked: bool = False, elsewhere: bool = False
) -> Check:
    """Whether NCCL's own segments fit into /dev/shm, whose (free, all) bytes are `room`.

    `over_host`: some ranks have no peer access to each other, so that their copies go through such segments.
    `linked`: all have NVLink between them. Of other pairs NCCL decides by their place on the board whether it uses
    the peer access that they have. `elsewhere`: this NCCL can do without such segments where the container lets it,
    which a start shows (`has_memory_elsewhere`).
    """
    name = "shared memory of NCCL"
    if room is None:
        return Check(
            name=name, ok=False, seen="no /dev/shm", remedy="mount a tmpfs there", needed=over_host and not elsewhere
        )
    free, total = room
    seen = f"{free / 2**20:,.0f} MiB free of {total / 2**20:,.0f} in /dev/shm"
    ring, all_pairs = (count * CHANNELS * SEGMENT_BYTES for count in (ranks, ranks * (ranks - 1)))
    if not over_host:
        most = COMMUNICATORS * (ranks * PROXY_BYTES + RINGS * ring)
        ok = linked or ranks == 1 or free >= most
        told = "little is needed" if ok else f"NCCL may copy through it, which takes {most / 2**20:,.0f} MiB"
        return Check(name=name, ok=ok, seen=f"{seen}; {told}", remedy=MORE_ROOM, needed=False)
    return Check(
        name=name,
        ok=free >= max(ADVISED_BYTES, all_pairs),
        seen=f"{seen}; copies between {ranks} ranks go through it and take {ring / 2**20:,.0f} MiB or more",
        remedy=MORE_ROOM,
        needed=free < ring and not elsewhere,
    )


def has_memory_elsewhere(nccl: str, driver_cuda: int) -> bool:
    """Whether NCCL of this version ("2.27.3"), with this driver (12060 is CUDA 12.6), has host memory of CUDA's own."""
    found = [int(part) for part in nccl.split(".")[:2] if part.isdigit()]
    return found >= MEMORY_ELSEWHERE and driver_cuda >= DRIVER_ELSEWHERE


def check_leftovers(left: Sequence[Leftover]) -> Check:
    """Segments of NCCL that no process of this user has."""
    num_bytes = sum(segment.num_bytes for segment in left)
    names = " ".join(str(segment.path) for segment in left)
    return Check(
        name="NCCL leftovers",
        ok=not left,
        seen=f"{len(left)} in /dev/shm, {num_bytes / 2**20:,.0f} MiB" if left else "none in /dev/shm",
        remedy=f"unless a container that shares /dev/shm uses them: rm {names}",
        needed=False,
    )


def version_of(package: str) -> str:
    """The installed version, or "missing"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"
