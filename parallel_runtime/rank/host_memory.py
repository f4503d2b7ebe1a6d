"""Memory of the host that a GPU may read by itself while the processor goes on. Owns how it is had.

torch's own pinned allocator rounds every tensor up to a power of two, a third more on average; shards are too big for
that. Pages of our own, registered with CUDA, are exact and go back to the system with the tensor.
"""

import mmap
import weakref

import torch


def host_bytes(num_bytes: int, *, device: torch.device) -> torch.Tensor:
    """`num_bytes` zero bytes on the host, as uint8; pinned when `device` is a CUDA device.

    Raises `RuntimeError` when that much cannot be pinned.
    """
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    held = torch.frombuffer(pages, dtype=torch.uint8, count=num_bytes)  # keeps the pages
    if device.type == "cuda":
        _pin(held)
    return held


def _pin(held: torch.Tensor) -> None:
    runtime = torch.cuda.cudart()
    error = int(runtime.cudaHostRegister(held.data_ptr(), held.nbytes, 1))  # 1: for every CUDA context
    if error:
        raise RuntimeError(
            f"{held.nbytes} bytes of host memory cannot be pinned (CUDA error {error}); free host memory, or use "
            "weights=sharded, which keeps the weights on the devices"
        )
    weakref.finalize(held, runtime.cudaHostUnregister, held.data_ptr())
