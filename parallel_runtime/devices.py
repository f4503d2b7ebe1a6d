"""Which devices the ranks live on: reading what a user wrote and holding it against what is there.

Owns names and counts of devices. Starts nothing and allocates nothing on them.
"""

import errno
import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from .kernel_calls import pidfd_open
from .plan import MAX_RANKS

STOCK_NODES = "use ComfyUI's own nodes here; on Windows, docs/recipes.md says what to try"
KINDS = ("cpu", "cuda")
SYSTEMS = {"win32": "Windows", "darwin": "macOS"}
_COUNT = re.compile(r"[+-]?[0-9]{1,9}")


def missing_system() -> str | None:
    """Why no worker can run on this system, None where they can: memfds, pidfds and sealed memory are Linux's."""
    system: str = sys.platform
    return _missing_call() if system == "linux" else f"workers need Linux, this is {SYSTEMS.get(system, system)}"


@cache
def _missing_call() -> str | None:
    try:
        os.close(pidfd_open(os.getpid()))
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EPERM):  # an old kernel, or a container's filter
            return f"workers need Linux 5.4 or newer, and a container that allows pidfd_open ({error.strerror})"
    return None


@dataclass(frozen=True, order=True)
class Device:
    """One rank's device. `cpu:0` and `cpu:1` are two ranks on the same processor.

    `machine` is the name of the further machine that has it, "" for one of this machine.
    """

    kind: str
    index: int
    machine: str = ""

    def __str__(self) -> str:
        return f"{self.kind}:{self.index}{f' on {self.machine}' if self.machine else ''}"

    @classmethod
    def of_machine(cls, text: str, machine: str) -> "Device":
        """The device that a further machine calls `text`."""
        kind, _, index = text.partition(":")
        return cls(kind, int(index), machine)


def gpu_uuid(index: int) -> str:
    """What tells this process's GPU of that number from all others; "" where this build of torch does not know it."""
    import torch  # here, so that reading a plan or a help text never waits for torch

    found = torch.cuda.get_device_properties(index)
    return str(found.uuid) if hasattr(found, "uuid") else ""


def numbered_uuid(device: Device) -> str:
    """The UUID of a GPU of this machine where this process has numbered its GPUs for good, else "".

    CUDA reads CUDA_VISIBLE_DEVICES once, when a process first uses it.
    """
    import torch

    numbered = device.kind == "cuda" and not device.machine and torch.cuda.is_initialized()
    return gpu_uuid(device.index) if numbered and device.index < torch.cuda.device_count() else ""


def ranks_by_machine(devices: Sequence[Device]) -> tuple[int, ...]:
    """How many consecutive devices each machine has, this one first."""
    return tuple(Counter(device.machine for device in devices).values())


@dataclass(frozen=True)
class DeviceSelection:
    """Devices in rank order, and what the user should be told about the choice."""

    devices: tuple[Device, ...]
    warnings: tuple[str, ...] = ()


def parse_devices(text: str, *, num_cuda: int | None = None) -> DeviceSelection:
    """Read `all`, a count (`2`), names (`cuda:0,cuda:2`) or CPU ranks (`cpu:2` is two).

    A count shrinks to what is there with a warning, so that a workflow saved for eight devices runs on one; a name
    that does not exist raises `ValueError`. `num_cuda` overrides the number of CUDA devices found.
    """
    words = [word.strip().lower() for word in text.split(",") if word.strip()]
    found = _count_cuda() if num_cuda is None else num_cuda
    if not words:
        raise ValueError("devices is empty; use all, a count, or names such as cuda:0,cuda:1 or cpu:2")
    if words == ["all"]:
        return _take(min(found, MAX_RANKS), found)
    if len(words) == 1 and _COUNT.fullmatch(words[0]):
        return _take(int(words[0]), found)
    if len(words) == 1 and words[0].startswith("cpu:"):
        return _cpu_ranks(_index(words[0]))
    devices = tuple(_named(word, found) for word in words)
    _refuse_repeats(devices)
    return DeviceSelection(devices)


def _take(count: int, found: int) -> DeviceSelection:
    if count == 0 and found == 0:
        return DeviceSelection(_cpu_ranks(1).devices, ("no CUDA device found; running one rank on the CPU",))
    if count < 1:
        raise ValueError(f"devices={count} is below 1; use all, or a count from 1 to {MAX_RANKS}")
    if count > MAX_RANKS:
        raise ValueError(f"devices={count} is above {MAX_RANKS}, the most ranks of one pool; use {MAX_RANKS} or fewer")
    if found == 0:
        warning = f"{count} devices asked for, no CUDA device found; running one rank on the CPU (cpu:N asks for more)"
        return DeviceSelection(_cpu_ranks(1).devices, (warning,))
    devices = tuple(Device("cuda", index) for index in range(min(count, found)))
    if count > found:
        return DeviceSelection(devices, (f"{count} devices asked for, {found} found; running on {found}",))
    return DeviceSelection(devices)


def _cpu_ranks(count: int) -> DeviceSelection:
    if not 1 <= count <= MAX_RANKS:
        raise ValueError(f"cpu:{count} asks for {count} CPU ranks; use cpu:1 to cpu:{MAX_RANKS}")
    return DeviceSelection(tuple(Device("cpu", index) for index in range(count)))


def _named(word: str, found: int) -> Device:
    kind, _, _ = word.partition(":")
    if kind not in KINDS:
        raise ValueError(f"device {word!r} is unknown; use all, a count, cuda:N or cpu:N")
    if kind == "cpu":
        raise ValueError(f"device {word!r} cannot be mixed with others; use cpu:N alone for N ranks on the CPU")
    index = _index(word)
    if index >= found:
        there = ", ".join(f"cuda:{i}" for i in range(found)) or "no CUDA device"
        remedy = "use what is there, or all" if found else "use cpu:2 to try things out"
        raise ValueError(f"device {word} does not exist; this machine has {there}; {remedy}")
    return Device(kind, index)


def _index(word: str) -> int:
    _, _, number = word.partition(":")
    if _COUNT.fullmatch(number) is None or number[0] in "+-":
        raise ValueError(f"device {word!r} has no index; write for example cuda:0 or cpu:2")
    return int(number)


def _refuse_repeats(devices: tuple[Device, ...]) -> None:
    if len(devices) > MAX_RANKS:
        raise ValueError(f"{len(devices)} devices named, more than {MAX_RANKS}, the most ranks of one pool; name fewer")
    repeated = sorted({str(device) for device in devices if devices.count(device) > 1})
    if repeated:
        raise ValueError(f"device {repeated[0]} stands twice; name each device once")


def _count_cuda() -> int:
    import torch  # here, so that reading a plan or a help text never waits for torch

    return torch.cuda.device_count()
