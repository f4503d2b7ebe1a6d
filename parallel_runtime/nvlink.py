"""Which GPUs of this machine NVLink connects, as the driver's library NVML says. Makes no CUDA context.

Owns the asking. NVML is asked through pynvml where that is installed. What follows for a plan is planner/machine.py's.
"""

import importlib
from contextlib import suppress
from functools import lru_cache
from itertools import combinations
from typing import Any

P2P_NVLINK = 2  # nvmlGpuP2PCapsIndex_t


@lru_cache(maxsize=16)
def all_linked(uuids: tuple[str, ...]) -> bool | None:
    """Whether NVLink is between each two of the GPUs with these UUIDs, as torch has them; None where NVML says nothing
    of them."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        handles = [handle_of(nvml, uuid) for uuid in uuids]
        said = [p2p_status(nvml, *pair, P2P_NVLINK) for pair in combinations(handles, 2)]
        return None if None in said else not any(said)
    except Exception:  # noqa: BLE001  none there, or another version: what such a package raises is its own affair
        return None


def handle_of(nvml: Any, uuid: str) -> Any | None:  # noqa: ANN401
    """NVML's handle of the device with torch's UUID, which lacks the prefix. NVML counts devices that torch hides."""
    for prefix in ("GPU-", "MIG-"):
        with suppress(nvml.NVMLError):
            return nvml.nvmlDeviceGetHandleByUUID(prefix + uuid.removeprefix(prefix))
    return None


def p2p_status(nvml: Any, first: Any | None, second: Any | None, what: int) -> int | None:  # noqa: ANN401
    """NVML's status of a way between two GPUs, 0 where it is there; None where NVML does not say."""
    if first is None or second is None:
        return None
    try:
        return int(nvml.nvmlDeviceGetP2PStatus(first, second, what))
    except nvml.NVMLError:
        return None
