"""What the planner must be told of this machine: its devices' constants and their free memory.

Owns the look at the machine. Constants come from the cache of `doctor --calibrate` where these devices have an entry or
more of the same GPUs have one, else from the table of known devices.
"""

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import psutil
import torch

from ..choices import card_choice
from ..devices import Device, gpu_uuid, ranks_by_machine
from ..exchange_groups import OverlapRates
from ..nvlink import all_linked
from ..plan import ParallelPlan
from ..shares import ALIKE
from .hardware import Calibration, Interconnect
from .known import BRIDGES, SHARED_ABOVE, known_calibration, known_link, table_name, usual_link
from .store import CalibrationStore

LINKED_BOARD = re.compile(r"\bsxm\d?\b|\binstinct mi[2-9]\d\d[ax]\b")  # NVLink's, and AMD's Infinity Fabric's
UNMEASURED = "ethernet1"  # between machines, until `doctor --calibrate --machines` has measured


def calibration_identity() -> tuple[str, int, int, int] | None:
    """The file of calibrations as it is now, another after each `doctor --calibrate`; None without one."""
    path = CalibrationStore.of_user().path
    try:
        found = path.stat()
    except OSError:
        return None
    return str(path), found.st_ino, found.st_mtime_ns, found.st_size


def device_set(devices: Sequence[Device]) -> str:
    """The name under which these devices' calibration is kept: what they are and how many, and torch's version."""
    return f"{len(devices)} x {_kind(devices)}"


def _kind(devices: Sequence[Device]) -> str:
    further = sorted({device.machine for device in devices if device.machine})
    there = f" with {' and '.join(further)}" if further else ""
    return f"{' + '.join(kinds_here(devices))}{there}, torch {torch.__version__}"


def kinds_here(devices: Sequence[Device]) -> list[str]:
    """What the devices of this machine are, each kind once, in order of their names. Makes no CUDA context."""
    here = [device for device in devices if not device.machine]
    return sorted(set(device_names(here)))


def device_names(devices: Sequence[Device]) -> list[str]:
    """What each of these devices of this machine is."""
    return [torch.cuda.get_device_name(d.index) if d.kind == "cuda" else f"cpu of {os.cpu_count()}" for d in devices]


def identity(device: Device) -> str:
    """What tells a device from another of its name in its place, as of a machine that has the user's folder, too."""
    if device.kind != "cuda" or device.machine:
        return str(device)
    return f"{device} {gpu_uuid(device.index)}".rstrip()


def share_a_bridge(devices: Sequence[Device]) -> bool:
    """Whether these are so many GPUs, which the table lacks, of one machine that pairs share the way between host
    bridges, and no NVLink is between them. Where the driver does not say it, boards that have it are told by their
    names. Not of AMD's: it is not known that a ring's kernel works there."""
    here = [device for device in devices if device.kind == "cuda" and not device.machine]
    if len(here) <= SHARED_ABOVE or len(here) < len(devices) or torch.version.hip is not None:
        return False
    name = torch.cuda.get_device_name(here[0].index)
    with suppress(ValueError):  # which it raises for a card that the table lacks
        usual_link(name, len(here))
        return False
    linked = all_linked(tuple(gpu_uuid(device.index) for device in here))
    return not (LINKED_BOARD.search(name.lower()) if linked is None else linked)


def look(devices: Sequence[Device], *, link: str | None = None) -> tuple[Calibration, list[int]]:
    """(constants, free bytes of each device). Raises `ValueError` for a device neither known nor calibrated."""
    return constants(devices, link=link), free_bytes(devices)


def constants(devices: Sequence[Device], *, link: str | None = None) -> Calibration:
    """The devices' constants, measured or known. Raises `ValueError` for a device that is neither.

    `link`, from the table, takes the place of what was measured of the link.
    """
    found = measured(devices)
    machines = ranks_by_machine(devices)
    if len(machines) > 1:
        return (
            _with_choices(found, devices[0])
            if found
            else _unmeasured(constants(devices[: machines[0]], link=link), machines)
        )
    if devices[0].kind == "cpu":
        name, present = "cpu", len(devices)
    else:
        name, present = torch.cuda.get_device_name(devices[0].index), torch.cuda.device_count()
    if found is None:
        link = link or _bridge(devices) or _slowest_link(devices, present)
        found = _with_speeds(known_calibration(name, link, devices=present), devices)
    else:
        found = as_told(_with_measured_speeds(found, devices), link=link)
    return _with_choices(found, devices[0])


def _bridge(devices: Sequence[Device]) -> str | None:
    """The bridge between two cards of a kind that may have one, where NVML says that it is there."""
    kinds = {table_name(name) for name in _names(devices)}
    if len(devices) != 2 or len(kinds) != 1 or torch.version.hip is not None:
        return None
    bridge = BRIDGES.get(kinds.pop())
    return bridge if bridge and all_linked(tuple(gpu_uuid(device.index) for device in devices)) else None


def _slowest_link(devices: Sequence[Device], present: int) -> str | None:
    """The slowest of the links that the kinds of these GPUs usually have, whichever is named first; None where the
    table knows none of them."""
    found = list[Interconnect]()
    for name in dict.fromkeys(_names(devices)):
        with suppress(ValueError):
            found.append(usual_link(name, present))
    return min(found, key=lambda link: link.all_to_all_bandwidth(present)).name if found else None


def _names(devices: Sequence[Device]) -> list[str]:
    return [torch.cuda.get_device_name(each.index) for each in devices if each.kind == "cuda"]


def _with_speeds(calibration: Calibration, devices: Sequence[Device]) -> Calibration:
    """The first device's constants with the others' speeds, where GPUs are of several kinds."""
    names = _names(devices)
    if len(set(names)) < 2:
        return calibration
    return _with_device_speeds(
        calibration, devices, {name: _table_s(name) for name in names}, calibration.rates.usual_s
    )


def _with_measured_speeds(calibration: Calibration, devices: Sequence[Device]) -> Calibration:
    """Measured constants with each device's speed, where GPUs are of several kinds: the first one's constants, where
    each kind was measured. Older files have the slowest one's alone, and the table says how fast the others are."""
    names, kinds = _names(devices), dict(calibration.kinds)
    if len(set(names)) < 2:
        return calibration
    if set(names) <= kinds.keys():
        first = replace(calibration, rates=kinds[names[0]])
        return _with_device_speeds(first, devices, {name: kinds[name].usual_s for name in names}, first.rates.usual_s)
    times = {name: _table_s(name) for name in names}
    slowest_s = max((seconds for seconds in times.values() if seconds is not None), default=1.0)
    return _with_device_speeds(calibration, devices, times, slowest_s)


def _table_s(name: str) -> float | None:
    """Seconds of a usual step by the table; None where it does not know the device."""
    try:
        return known_calibration(name).rates.usual_s
    except ValueError:
        return None


def _with_device_speeds(
    calibration: Calibration, devices: Sequence[Device], times: Mapping[str, float | None], constants_s: float
) -> Calibration:
    """The constants, whose device takes `constants_s` for a usual step, with the speeds of devices that take `times`,
    by their names; None: it is unknown, and taken to be as quick as the first."""
    names, told = _names(devices), dict[str, None]()
    first_s = times[names[0]] or constants_s
    for device, name in zip(devices, names, strict=True):
        if (seconds := times[name]) is None:
            told[f"{device} ({name}) is unknown, and taken to be as quick as {devices[0]}"] = None
        elif name != names[0]:
            told[f"{device} ({name}) at {first_s / seconds:.2f} of the speed of {devices[0]}"] = None
    speeds = [constants_s / (times[name] or first_s) for name in names]
    source = "; ".join([calibration.source, *told])
    if max(speeds) > ALIKE * speeds[0]:
        source = f"{source}; name the quickest device first, so that it is weighed alone"
    return replace(calibration, speeds=tuple(speeds), source=source)


def _with_choices(calibration: Calibration, device: Device) -> Calibration:
    """With what was chosen for the device's capability (choices.py), as ranks are told it."""
    if device.kind == "cpu":
        return calibration
    chosen = card_choice(torch.device(device.kind, device.index))
    return replace(calibration, rates=replace(calibration.rates, most_chunks=chosen.most_chunks))


def _unmeasured(here: Calibration, machines: tuple[int, ...]) -> Calibration:
    """Constants of one machine for several equal machines, with a link between them that is not measured."""
    source = f"{here.source}; the link between machines is taken for {UNMEASURED}, as it was not measured"
    speeds = here.speeds * len(machines) if len(set(machines)) == 1 else ()
    return replace(here, between=known_link(UNMEASURED), machines=machines, source=source, speeds=speeds)


def measured(devices: Sequence[Device]) -> Calibration | None:
    """What `doctor --calibrate` measured of these devices, or of more of the same GPUs; None where it did not."""
    store = CalibrationStore.of_user()
    if len(machines := ranks_by_machine(devices)) > 1:  # measured together or not at all
        found = store.load(device_set(devices))
        return None if found is None else replace(found, machines=machines)
    if devices[0].kind == "cpu":  # more ranks have fewer cores each, so no other number stands for these
        return store.load(device_set(devices))
    return store.load_for(_kind(devices), len(devices))


def as_told(calibration: Calibration, *, link: str | None) -> Calibration:
    """Measured constants with a link that the user names. Raises `ValueError` for one that is not in the table."""
    if link is None:
        return calibration
    source = f"{calibration.source}; the link is the table's {link}, as told"
    return replace(calibration, link=known_link(link), source=source)


def overlap(devices: Sequence[Device], plan: ParallelPlan) -> OverlapRates | None:
    """By what ranks of a plan on these devices send heads in chunks. None on a CPU, whose cores carry the bytes
    themselves, on unknown devices, and where a plan shares out no heads. Nor on AMD's of several kinds: ComfyUI chooses
    its attention function by the kind, and not every one can take the heads of a call in parts."""
    if devices[0].kind == "cpu" or plan.ulysses == 1:
        return None
    if torch.version.hip is not None:
        if any(device.machine for device in devices):  # whose kinds are not known here
            return None
        if len(kinds_here(devices)) > 1:
            return None
    try:
        found = constants(devices)
    except ValueError:  # neither calibrated nor in the table
        return None
    return OverlapRates(
        attention_flops=found.rates.attention_flops,
        bandwidth=found.link.all_to_all_bandwidth(plan.ulysses),
        latency_s=found.link.latency_s,
        most_chunks=found.rates.most_chunks,
    )


def free_bytes(devices: Sequence[Device]) -> list[int]:
    """Free memory of each device; ranks on the CPU share what the host has."""
    here = [device for device in devices if not device.machine]
    known = [
        torch.cuda.mem_get_info(device.index)[0]
        if device.kind == "cuda"
        else psutil.virtual_memory().available // len(here)
        for device in here
    ]
    return _as_elsewhere(known, devices)


def whole_bytes(devices: Sequence[Device]) -> list[int]:
    """All memory of each device. Unlike `free_bytes`, makes no CUDA context, which takes some of every device asked."""
    here = [device for device in devices if not device.machine]
    known = [
        torch.cuda.get_device_properties(device.index).total_memory
        if device.kind == "cuda"
        else psutil.virtual_memory().total // len(here)
        for device in here
    ]
    return _as_elsewhere(known, devices)


def _as_elsewhere(here: list[int], devices: Sequence[Device]) -> list[int]:
    """The bytes of devices here, and as many as the least of them for each of further machines, which come behind."""
    return [*here, *[min(here)] * (len(devices) - len(here))]
