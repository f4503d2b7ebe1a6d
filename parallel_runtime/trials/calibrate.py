"""Measures what the planner's constants are on these devices, through the pool that will run the images.

Owns what is measured and how constants follow from it; keeps nothing. Everything is the slowest rank's, with all ranks
busy at once, as they are in a step.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from ..devices import ranks_by_machine
from ..plan import ParallelPlan
from ..planner.hardware import NARROW, WIDE, Calibration, Interconnect, Rates
from ..planner.known import EAGER, ON_CPU, known_link
from ..planner.machine import device_names, free_bytes
from ..pool.pool import Pool
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
