"""Where something was measured: versions, devices, and how busy the driver says they are. No user, no folder."""

import platform
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from .. import VERSION
from ..devices import Device

DRIVER_FILE = Path("/proc/driver/nvidia/version")
CPU_FILE = Path("/proc/cpuinfo")
SAMPLE_S = 1.0  # the driver looks back at most so long (NVML, nvmlDeviceGetUtilizationRates: 1/6 s to 1 s)


def versions(**others: str) -> dict[str, str]:
    """Versions of the pack and of what it runs on; CUDA's and the driver's where there are any; and `others`."""
    found = {"pack": VERSION, "python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    if driver := _first_match(DRIVER_FILE, r"Kernel Module\s+(?:for \S+\s+)?(\d[\d.]*)"):
        found["driver"] = driver
    return found | others


def describe_devices(devices: Sequence[Device]) -> list[dict]:
    """Name, kind, model and memory of each device, in rank order. Ranks on the CPU share one memory."""
    return [_describe(device) for device in devices]


def utilisation(devices: Sequence[Device], *, over_s: float) -> dict[int, float]:
    """How busy the driver says each rank's device was in the last moments, 0 to 1, by rank; only where it tells.

    `over_s` is how long the run took that has just ended: of one shorter than the driver's sample it says nothing.
    """
    if over_s < SAMPLE_S:
        return {}
    busy = {}
    for rank, device in enumerate(devices):
        if device.kind != "cuda" or device.machine:
            continue
        # No run may end by this. Where a library or driver is missing, or a slice of a device does not tell, NVIDIA's
        # library and AMD's raise errors of their own; AMD's may also say "N/A".
        with suppress(Exception):
            busy[rank] = torch.cuda.utilization(device.index) / 100
    return busy


def _describe(device: Device) -> dict:
    entry: dict = {"name": str(device), "kind": device.kind}
    if device.machine:
        return entry
    if device.kind == "cuda":
        properties = torch.cuda.get_device_properties(device.index)
        return entry | {"model": properties.name, "memory_bytes": properties.total_memory}
    if model := _first_match(CPU_FILE, r"model name\s*:\s*(.*\S)") or platform.machine():
        entry["model"] = model
    return entry | {"memory_bytes": psutil.virtual_memory().total}


def _first_match(path: Path, pattern: str) -> str:
    """What the pattern's group matches in the file; "" when there is no such file or no match."""
    if not path.exists():
        return ""
    found = re.search(pattern, path.read_text(encoding="utf-8", errors="replace"))
    return found.group(1) if found else ""
