"""Chooses a plan: predicts every candidate, drops what does not fit or cannot run, takes the fastest, and says why.

Owns the rules of the choice. Pure and quick (milliseconds): no device is asked and nothing is measured here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..plan import Layout, ParallelPlan
from .candidates import WEIGHTS, Candidate, candidates
from .cost import Cost, step_cost
from .hardware import GIB, Calibration
from .memory import Memory, memory_of
from .shapes import ModelShape, Work

WORTHWHILE = 1.05  # more ranks must be this much faster than one, or one is taken
EQUAL = 1.02  # predictions this close are equal, and the simpler plan is taken
HEADROOM = 0.95  # of the free memory; the allocator does not use the last of it


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One candidate: its time, its memory, and whether it may be chosen."""

    candidate: Candidate
    cost: Cost
    memory: Memory
    run_s: float
    fits: bool
    runnable: bool


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The plan taken. `plan` is None when nothing that this version runs fits; `reasons` says what to do then.

    `table` holds every candidate considered, quickest first, also those that were only shown.
    """

    plan: ParallelPlan | None
    chosen: Prediction | None
    reasons: tuple[str, ...]
    table: tuple[Prediction, ...]

    @property
    def seconds_per_step(self) -> float | None:
        """Predicted seconds of one step, None without a plan."""
        return self.chosen.cost.step_s if self.chosen else None


def choose_plan(
    model: ModelShape,
    work: Work,
    devices: Sequence[int],
    calibration: Calibration,
    *,
    every_plan: bool = False,
    stale: bool = False,
    weights: Sequence[str] = WEIGHTS,
    held: Layout | None = None,
) -> Choice:
    """The best plan of `model` for `work` on `devices`, given as free bytes of each, in rank order.

    `every_plan` also shows what this version cannot run, which is never taken; `stale` also takes PipeFusion, whose
    result differs from one process's. `weights`: the kinds that are weighed; `held`: how they lie
    already, if only plans that they serve are to be weighed. Raises `ValueError` without devices.
    """
    if not devices:
        raise ValueError("no devices to plan for; give at least one")
    everything = predictions(model, work, devices, calibration, every_plan=every_plan, stale=stale)
    table = tuple(
        sorted(
            (row for row in everything if row.candidate.weights in weights and _served(row.candidate, held)),
            key=lambda row: (row.run_s, row.candidate.ranks),
        )
    )
    choosable = [row for row in table if row.fits and row.runnable]
    if not choosable:
        return Choice(plan=None, chosen=None, reasons=_nothing_fits(table, devices), table=table)
    chosen = _best(choosable)
    reasons = (*_reasons(chosen, table, devices), f"constants: {calibration.source}")
    return Choice(plan=chosen.candidate.plan(), chosen=chosen, reasons=reasons, table=table)


def predictions(
    model: ModelShape,
    work: Work,
    devices: Sequence[int],
    calibration: Calibration,
    *,
    every_plan: bool = False,
    stale: bool = False,
) -> list[Prediction]:
    """Every candidate on one device, on two, up to all."""
    found = []
    for ranks in range(1, len(devices) + 1):
        free = min(devices[:ranks])
        for candidate in candidates(
            ranks, heads=model.heads, batch=work.batch, guided=work.guided, blocks=model.blocks
        ):
            runnable = candidate.plan() is not None
            if (runnable or every_plan) and (candidate.exact or stale):
                found.append(_predict(model, work, candidate, calibration, free=free, runnable=runnable))
    return found


def _predict(
    model: ModelShape, work: Work, candidate: Candidate, calibration: Calibration, *, free: int, runnable: bool
) -> Prediction:
    cost = step_cost(model, work, candidate, calibration)
    memory = memory_of(model, work, candidate, calibration.rates)
    return Prediction(
        candidate=candidate,
        cost=cost,
        memory=memory,
        run_s=cost.image_s(work.steps),
        fits=memory.total <= HEADROOM * free,
        runnable=runnable,
    )


def _served(candidate: Candidate, held: Layout | None) -> bool:
    plan = candidate.plan()
    return held is None or (plan is not None and held.serves(plan.layout))


def _best(rows: list[Prediction]) -> Prediction:
    """The quickest; among equals the one with fewer ranks, then less ring; one rank where more hardly help."""
    fastest = rows[0]
    single = next((row for row in rows if row.candidate.ranks == 1), None)
    if single is not None and single.run_s <= WORTHWHILE * fastest.run_s:
        return single
    equals = [row for row in rows if row.run_s <= EQUAL * fastest.run_s]
    return min(equals, key=lambda row: (row.candidate.ranks, row.candidate.weights != "replicated", row.candidate.ring))


def _reasons(chosen: Prediction, table: Sequence[Prediction], devices: Sequence[int]) -> tuple[str, ...]:
    cost, name = chosen.cost, chosen.candidate.name
    share = max(cost.compute_s, cost.communication_s, cost.launch_s) / cost.step_s
    reasons = [f"{name}: {_time(cost.step_s)} a step, bound by {cost.bound} ({share:.0%} of the step)"]
    single = _find(table, Candidate())
    if chosen.candidate.ranks == 1:
        more = next((row for row in table if row.candidate.ranks > 1 and row.fits and row.runnable), None)
        if more is not None:
            speed = chosen.run_s / more.run_s
            reasons.append(
                f"one device is better here: the best plan on more, {more.candidate.name}, would be {speed:.2f}x as "
                f"fast, bound by {more.cost.bound}"
            )
    elif single is not None:
        gain = f"{single.run_s / chosen.run_s:.2f}x as fast as one device ({_time(single.cost.step_s)} a step)"
        reasons.append(gain if single.fits else f"{gain}, where it does not fit")
    missing = next((row for row in table if row.fits and not row.runnable), None)
    if missing is not None and missing.run_s < chosen.run_s:
        reasons.append(f"{missing.candidate.name} would take {_time(missing.cost.step_s)}; this version cannot run it")
    unused = len(devices) - chosen.candidate.ranks
    if unused and chosen.candidate.ranks > 1:
        reasons.append(f"{unused} of {len(devices)} devices stay unused: with them it would not be faster")
    if chosen.candidate.weights != "replicated" and any(row.candidate.weights == "replicated" for row in table):
        reasons.append(_why_not_replicated(chosen, table, devices))
    return tuple(reasons)


def _why_not_replicated(chosen: Prediction, table: Sequence[Prediction], devices: Sequence[int]) -> str:
    whole = [row for row in table if row.candidate.weights == "replicated"]
    least = min((row.memory.total for row in whole), default=0)
    weights = chosen.candidate.weights
    free = f"{_gib(min(devices))} free of which {HEADROOM:.0%} can be used"
    return (
        f"does not fit with replicated weights: {_gib(least)} a rank, {free}; "
        f"use {weights} weights, {_gib(chosen.memory.total)} a rank"
    )


def _nothing_fits(table: Sequence[Prediction], devices: Sequence[int]) -> tuple[str, ...]:
    free = min(devices)
    if not table:
        return (f"no plan on {len(devices)} devices fits the model's heads; use another number of devices",)
    least = min(table, key=lambda row: row.memory.total)
    remedy = "free memory, use a smaller image or an fp8 file, or more devices"
    if least.candidate.weights == "replicated":
        remedy = "use sharded weights where this version has them, " + remedy
    return (
        f"does not fit: {least.candidate.name} needs the least, {_gib(least.memory.total)} a rank, {_gib(free)} free; "
        f"{remedy}",
    )


def _find(table: Sequence[Prediction], candidate: Candidate) -> Prediction | None:
    return next((row for row in table if row.candidate == candidate), None)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"
