"""What timing a step's regions costs: the same step with them and without, in turn, so that drift hits both alike.

Owns the pairs and their ratios. The model is bound by the overhead of its many small operations, where a region is the
largest part of what it times. A timer that is off cannot be taken away, so what it costs is no figure here.
"""

from __future__ import annotations

import time
from statistics import median, quantiles

from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.pool import Pool
from parallel_runtime.trials.plan_runner import PlanRunner
from parallel_runtime.trials.trial import Trial

PLANS = (ParallelPlan(), ParallelPlan(ulysses=2))
WARMUP, PAIRS = 10, 200


def rows(pool: Pool, trial: Trial) -> list[tuple[str, str, str]]:
    """Figure, target, measured, of a plan each. A step counts from the call of the pool to its result."""
    return [_row(plan, pairs(pool, trial, plan)) for plan in PLANS]


def pairs(pool: Pool, trial: Trial, plan: ParallelPlan) -> list[tuple[float, float]]:
    """Seconds of a step, regions on and off, measured one right after the other; which goes first alternates."""
    runners = {on: PlanRunner(pool, trial.spec, plan, options={"timed": on}) for on in (True, False)}
    found = []
    for number in range(WARMUP + PAIRS):
        first = number % 2 == 0
        seconds = {}
        for on in (first, not first):
            began = time.perf_counter()
            runners[on].run(trial.calls)
            seconds[on] = time.perf_counter() - began
        found += [(seconds[True], seconds[False])] if number >= WARMUP else []
    return found


def _row(plan: ParallelPlan, found: list[tuple[float, float]]) -> tuple[str, str, str]:
    ratios = [on / off for on, off in found]
    low, middle, high = (100 * (ratio - 1) for ratio in quantiles(ratios, n=4, method="inclusive"))
    name = "one rank" if plan.ranks == 1 else plan.name
    off_ms = 1000 * median(off for _, off in found)
    measured = f"{middle:+.2f} % (quarters {low:+.2f} to {high:+.2f}; a step {off_ms:.1f} ms, {len(found)} pairs)"
    return f"regions on, over off, {name}, overhead-bound", "at most +3 %", measured
