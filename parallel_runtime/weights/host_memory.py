"""Memory of the host: pages that a GPU may read by itself while the processor goes on, and how pages are given back.

torch's own pinned allocator rounds every tensor up to a power of two, a third more on average; shards are too big for
that. Pages of our own, registered with CUDA, are exact and go back to the system with the tensor.
"""

import ctypes
import mmap
import weakref
from contextlib import suppress

import torch


def host_bytes(num_bytes: int, *, device: torch.device) -> torch.Tensor:
    """`num_bytes` zero bytes on the host, as uint8; pinned when `device` is a CUDA device.

    Raises `RuntimeError` when that much cannot be pinned.
    """
    if not num_bytes:  # of a rank whose share of a unit rounds to nothing
        return torch.zeros(0, dtype=torch.uint8)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    held = torch.frombuffer(pages, dtype=torch.uint8, count=num_bytes)  # keeps the pages
    if device.type == "cuda":
        _pin(held)
    return held


def give_back_heap() -> None:
    """Return the heap's free pages to the system, as glibc alone does only for those at its top (malloc_trim(3))."""
    with suppress(AttributeError):  # other C libraries have no such call
        ctypes.CDLL(None).malloc_trim(0)


def _pin(held: torch.Tensor) -> None:
    runtime = torch.cuda.cudart()
    error = int(runtime.cudaHostRegister(held.data_ptr(), held.nbytes, 1))  # 1: for every CUDA context
    if error:
        raise RuntimeError(
            f"{held.nbytes} bytes of host memory cannot be pinned (CUDA error {error}); free host memory, or use "
            "weights=sharded, which keeps the weights on the devices"
        )
    weakref.finalize(held, runtime.cudaHostUnregister, held.data_ptr())
