"""What a rank's device is: how much memory is free and how fast it multiplies.

Owns the measurements. What follows from them (unequal ranks, a plan that does not fit) is the caller's.
"""

import os
import platform
import statistics
import time

import psutil
import torch

from ..timing import wait_for_all
from ..weights.device_memory import device_memory
from ..wire.replies import MeasureReply

RUNS = 5
ROWS = {"cpu": 512, "cuda": 4096}  # of the square matrices: long enough to time, short enough not to be noticed
BF16_CAPABILITY = (8, 0)  # from which there are matrix units for bf16; before, it is emulated, and models run in fp16


def free_bytes(device: torch.device) -> int:
    """Bytes that new weights may take on the device; what torch only keeps for later is free."""
    gpu = device_memory(device)
    return psutil.virtual_memory().available if gpu is None else gpu.free + gpu.reserved - gpu.allocated


def computing_dtype(device: torch.device) -> torch.dtype:
    """What models compute in on a device of this kind."""
    if device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= BF16_CAPABILITY else torch.float16


def operand(*shape: int, device: torch.device) -> torch.Tensor:
    """Random values to measure with: equal ones flip few bits, draw less power and look faster than a model's."""
    return torch.randn(shape, dtype=computing_dtype(device), device=device)


def measure(device: torch.device) -> MeasureReply:
    """The device's speed is the median of a few products."""
    return MeasureReply(name=_name(device), free_bytes=free_bytes(device), gflops=_gflops(device))


def _gflops(device: torch.device) -> float:
    rows = ROWS[device.type]
    matrix = operand(rows, rows, device=device)
    seconds = []
    for _ in range(RUNS + 1):
        began = time.perf_counter()
        matrix @ matrix
        wait_for_all(device)
        seconds.append(time.perf_counter() - began)
    return 2 * rows**3 / statistics.median(seconds[1:]) / 1e9  # the first one warms up


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()}, {os.cpu_count()} cores"
