"""Memory of the host: how much there is, pages that a GPU may read while the processor goes on, and giving them back.

torch's own pinned allocator rounds every tensor up to a power of two, a third more on average; shards are too big for
that. Pages of our own, registered with CUDA, are exact and go back to the system with the tensor.
"""

import ctypes
import functools
import logging
import mmap
import re
import weakref
from contextlib import suppress

import psutil
import torch

from ..process.control_groups import groups_of
from ..timing import wait_for_all

# A control group's limit, what it uses, and how it names pages of files in memory.stat, by version of cgroups(7).
VERSIONS = {2: ("memory.max", "memory.current", ""), 1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")}
log = logging.getLogger(__name__)


def host_memory() -> tuple[int, int]:
    """(available, all) bytes of this machine's memory, or of a control group's limit where that is less and told."""
    memory = psutil.virtual_memory()
    available, total = int(memory.available), int(memory.total)
    for version, (limits, uses, of_all) in VERSIONS.items():
        for group in groups_of("memory", version):
            with suppress(OSError, ValueError):  # no such group, or no limit
                limit, used = (int((group / name).read_text()) for name in (limits, uses))
                said = (group / "memory.stat").read_text()
                files = re.findall(rf"^{of_all}(?:in)?active_file (\d+)$", said, re.MULTILINE)  # pages that go at need
                available, total = min(available, limit - used + sum(map(int, files))), min(total, limit)
    return available, total


def host_bytes(num_bytes: int, *, device: torch.device) -> torch.Tensor:
    """`num_bytes` zero bytes on the host, as uint8; pinned when `device` is a CUDA device and that many can be.

    From others a GPU takes them all the same, more slowly. Raises `RuntimeError` where memory lacks for them.
    """
    if not num_bytes:  # of a rank whose share of a unit rounds to nothing
        return torch.zeros(0, dtype=torch.uint8)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    held = torch.frombuffer(pages, dtype=torch.uint8, count=num_bytes)  # keeps the pages
    if device.type == "cuda":
        _pin(held, device)
    return held


def give_back_heap() -> None:
    """Return the heap's free pages to the system, as glibc alone does only for those at its top (malloc_trim(3))."""
    with suppress(AttributeError):  # other C libraries have no such call
        ctypes.CDLL(None).malloc_trim(0)


def give_back_pinned(device: torch.device) -> None:
    """Return pinned memory that torch only caches to the system, once a GPU has done what reads or writes it.

    torch keeps that of every input, as of ControlNets, until the process ends. Torch 2.6 has no public name for this; a
    torch without CUDA has no such memory.
    """
    if device.type == "cuda" and hasattr(torch._C, "_host_emptyCache"):
        wait_for_all(device)
        torch._C._host_emptyCache()


def _pin(held: torch.Tensor, device: torch.device) -> None:
    runtime = torch.cuda.cudart()
    error = int(runtime.cudaHostRegister(held.data_ptr(), held.nbytes, 1))  # 1: for every CUDA context
    if error and host_memory()[0] < held.nbytes:
        raise RuntimeError(
            f"{held.nbytes} bytes of host memory cannot be pinned (CUDA error {error}); free host memory, or use "
            "weights=sharded, which keeps the weights on the devices"
        )
    if error:
        _tell_unpinned(error)
        with suppress(RuntimeError):  # CUDA says it again to the next caller
            torch.zeros(1, device=device).add_(1)
            torch.cuda.synchronize(device)
        return
    weakref.finalize(held, runtime.cudaHostUnregister, held.data_ptr())


@functools.cache
def _tell_unpinned(error: int) -> None:
    """Once."""
    log.warning("weights in host memory cannot be pinned (CUDA error %d): their copies to the GPU are slower", error)
