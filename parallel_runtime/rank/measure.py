"""What a rank's device is: how much memory it has and how fast it multiplies.

Owns the measurements. What follows from them (unequal ranks, a plan that does not fit) is the caller's.
"""

import os
import platform
import statistics
import time
from typing import Any

import psutil
import torch

RUNS = 5
# (rows, dtype) of the square matrices: long enough to time, short enough not to be noticed
PRODUCTS = {"cpu": (512, torch.float32), "cuda": (4096, torch.bfloat16)}


def free_bytes(device: torch.device) -> int:
    """Bytes that new weights may take on the device."""
    return _memory(device)[0]


def measure(device: torch.device) -> dict[str, Any]:
    """`name`, `free_bytes`, `total_bytes`, and `gflops`: 10^9 operations a second, the median of a few products."""
    free, total = _memory(device)
    return {"name": _name(device), "free_bytes": free, "total_bytes": total, "gflops": _gflops(device)}


def _gflops(device: torch.device) -> float:
    rows, dtype = PRODUCTS[device.type]
    matrix = torch.full((rows, rows), 0.5, dtype=dtype, device=device)
    seconds = []
    for _ in range(RUNS + 1):
        _wait(device)
        began = time.perf_counter()
        matrix @ matrix
        _wait(device)
        seconds.append(time.perf_counter() - began)
    return 2 * rows**3 / statistics.median(seconds[1:]) / 1e9  # the first one warms up


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _memory(device: torch.device) -> tuple[int, int]:
    """Free and total bytes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()}, {os.cpu_count()} cores"
