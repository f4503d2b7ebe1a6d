"""Memory of a GPU: how much there is and who has it, and giving back what torch only caches.

Does not own the memory of the host (host_memory.py).
"""

from typing import NamedTuple

import torch


class DeviceMemory(NamedTuple):
    """Bytes of a device: free for any process, taken by torch in this one and by its tensors, and all."""

    free: int
    reserved: int
    allocated: int
    total: int


def device_memory(device: torch.device) -> DeviceMemory | None:
    """What is free on a GPU; None for the CPU, whose memory is every rank's and ComfyUI's."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(free, torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device), total)


def empty_cache(device: torch.device) -> None:
    """Have torch keep no free memory of a GPU, such as that of weights while they were merged in fp32.

    It finds such memory again by itself; NCCL, cuBLAS and other processes do not.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
