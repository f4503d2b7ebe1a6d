"""Measures what the planner's constants are on these devices, through the pool that will run the images.

Owns what is measured and how constants follow from it. `doctor --calibrate` runs it and keeps the result. Everything is
the slowest rank's, with all ranks busy at once, as they are in a step.
"""

import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TypeAlias

from ..devices import Device, ranks_by_machine
from ..machines.machine import Machine
from ..plan import ParallelPlan
from ..planner.hardware import NARROW, WIDE, Calibration, Interconnect, Rates
from ..planner.known import EAGER, ON_CPU, known_link
from ..planner.machine import device_names, device_set, free_bytes
from ..planner.store import CalibrationStore
from ..pool.pool import Pool
from ..pool.ranks import deadline_from
from ..redact_paths import with_short_home
from ..wire.replies import ProbeReply

Point: TypeAlias = tuple[float, float]  # an amount, and the seconds that it took
Probes = Mapping[int, Sequence[ProbeReply]]  # by the ranks of the axis that was probed


@dataclass(frozen=True)
class FittedLine:
    """Seconds of a call: a constant, and a rate at which it works off its amount."""

    rate: float
    latency_s: float

    @classmethod
    def through(cls, points: Sequence[Point]) -> "FittedLine":
        """The line through (amount, seconds) of a small and a large call, or from zero when noise has it falling."""
        (small, quick), (large, slow) = points[0], points[-1]
        rate = (large - small) / (slow - quick) if large > small and slow > quick else large / slow
        return cls(rate, max(0.0, quick - small / rate))


def keep_calibration(devices: tuple[Device, ...], machines: Sequence[Machine] = ()) -> dict[str, object]:
    """Start ranks on the devices and on those of further machines, calibrate, and keep the result for `plan` and
    automatic plans.

    Returns what was measured, how long it took and where it is kept. Raises `ValueError` where that cannot be written.
    """
    store = CalibrationStore.of_user()
    began = time.perf_counter()
    devices += tuple(Device.of_machine(text, machine.name) for machine in machines for text in machine.devices)
    further = (lambda _: machines) if machines else None
    with Pool(devices, deadline_s=deadline_from(os.environ), threads_per_rank=1, machines=further) as pool:
        found = calibrate(pool)
    try:
        store.save(device_set(devices), found)
    except OSError as error:
        remedy = "set XDG_CACHE_HOME to a folder that can be written"
        raise ValueError(f"{store.path} cannot be written ({error.strerror}); {remedy}") from error
    return {
        "devices": device_set(devices),
        "file": with_short_home(str(store.path)),
        "wall_s": time.perf_counter() - began,
        "constants": asdict(found),
    }


def describe_calibration(kept: Mapping) -> str:
    """What was measured, in two lines for people."""
    constants = kept["constants"]
    rates, link, software = constants["rates"], constants["link"], constants["software"]
    between = ""
    if constants["between"] is not None:
        rate, latency = constants["between"]["bandwidth"], constants["between"]["latency_s"]
        between = f"between machines {rate * 8 / 1e9:.3g} Gbit/s and {latency * 1e6:.0f} us, "
    return (
        f"calibrated {kept['devices']} in {kept['wall_s']:.1f} s: matrices {rates['matmul_flops'] / 1e12:.3g} TFLOP/s, "
        f"attention {rates['attention_flops'] / 1e12:.3g} TFLOP/s, memory {rates['memory_bandwidth'] / 1e9:.3g} GB/s, "
        f"link {link['bandwidth'] / 1e9:.3g} GB/s and {link['latency_s'] * 1e6:.0f} us, "
        f"{between}operation {software['operation_s'] * 1e6:.1f} us\nkept in {kept['file']}; plan uses it from now on"
    )


def calibrate(pool: Pool) -> Calibration:
    """Measure, in a few seconds. Raises `PoolError`."""
    machines = ranks_by_machine(pool.devices)
    asynchronous = pool.devices[0].kind == "cuda"
    probes = {span: pool.probe(plan) for span, plan in _spans(machines[0]).items()}
    names = device_names(pool.devices[: machines[0]])
    of_kinds = {
        name: _rates(pool, [rank for rank, its in zip(probes[max(probes)], names, strict=False) if its == name])
        for name in dict.fromkeys(names)
    }
    several = len(machines) == 1 and len(of_kinds) > 1
    rates = of_kinds[names[0]] if several else _rates(pool, probes[max(probes)])
    link = _link(probes)
    software = replace(EAGER if asynchronous else ON_CPU, operation_s=_operation_s(probes[max(probes)]))
    found = Calibration(rates=rates, link=link, software=software, source="measured on these devices by doctor")
    if len(machines) == 1:
        return replace(found, kinds=tuple(of_kinds.items())) if several else found
    return replace(found, between=_between(pool.probe(ParallelPlan(ulysses=sum(machines)))), machines=machines)


def _spans(ranks: int) -> dict[int, ParallelPlan]:
    """The plans to probe, by the ranks of their ulysses axis: all at once, and pairs at the same time."""
    spans = {ranks: ParallelPlan(ulysses=ranks)}
    if ranks > 2 and ranks % 2 == 0:
        spans[2] = ParallelPlan(ulysses=2, ring=ranks // 2)
    return spans


def _slowest(ranks: Iterable[Sequence[Point]]) -> list[Point]:
    """(amount, seconds) of the slowest rank that measured any, by size."""
    return [max(points, key=lambda point: point[1]) for points in zip(*filter(None, ranks), strict=True)]


def _rates(pool: Pool, ranks: Sequence[ProbeReply]) -> Rates:
    """Of the slowest of these ranks."""
    asynchronous = pool.devices[0].kind == "cuda"
    return Rates(
        name=str(pool.devices[0].kind),
        matmul_flops=FittedLine.through(_slowest(rank.matmul for rank in ranks)).rate,
        attention_flops=FittedLine.through(_slowest(rank.attention for rank in ranks)).rate,
        memory_bandwidth=FittedLine.through(_slowest(rank.memory for rank in ranks)).rate,
        memory_bytes=min(free_bytes(pool.devices)),
        asynchronous=asynchronous,
        elementwise_bandwidth=FittedLine.through(_slowest(rank.elementwise for rank in ranks)).rate,
        score_s=0.0 if asynchronous else _score_s(ranks),
    )


def _score_s(ranks: Sequence[ProbeReply]) -> float:
    """What an exponential takes: FLOPs of small heads have more of them, so they are slower by that."""
    wide, narrow = (
        FittedLine.through(_slowest(points)).rate
        for points in ((rank.attention for rank in ranks), (rank.narrow_attention for rank in ranks))
    )
    return max(0.0, (1 / narrow - 1 / wide) / (1 / (4 * NARROW) - 1 / (4 * WIDE)))


def _link(probes: Probes) -> Interconnect:
    """Bandwidth and latency of an exchange between two, and how much slower one among all is."""
    least, most = min(probes), max(probes)
    if most == 1:
        return known_link("memory")  # one rank exchanges nothing
    near = FittedLine.through(_slowest(rank.all_to_all for rank in probes[least]))
    far = FittedLine.through(_slowest(rank.all_to_all for rank in probes[most]))
    contention = 0.0 if least == most else max(0.0, math.log(near.rate / far.rate) / math.log(most / least))
    # Told for two ranks; where no pairs could be probed, what all of them reach at once stands for two.
    return Interconnect(name="measured", bandwidth=near.rate, latency_s=far.latency_s, contention=contention)


def _between(ranks: Sequence[ProbeReply]) -> Interconnect:
    """The link between machines, while each rank sends to all others at once."""
    line = FittedLine.through(_slowest(rank.all_to_all for rank in ranks))
    return Interconnect(name="measured between machines", bandwidth=line.rate, latency_s=line.latency_s)


def _operation_s(ranks: Sequence[ProbeReply]) -> float:
    return 1 / FittedLine.through(_slowest(rank.operations for rank in ranks)).rate
