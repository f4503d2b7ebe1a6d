"""Runs cases in turn, so that whatever the machine does meanwhile hits all of them alike, and makes their rows.

Owns the order of runs, the clock around each and the medians. Does not own what a case runs, nor how two results
are held against each other.
"""

import logging
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from ..devices import Device
from ..plan import ParallelPlan
from .build import Span, case, compare, plan_part, rank_parts
from .environment import utilisation

log = logging.getLogger(__name__)
Error: TypeAlias = Callable[[torch.Tensor, torch.Tensor], float]


@dataclass(frozen=True, kw_only=True)
class CaseRun:
    """What one run of a case gave: its result on the CPU, and of workers what they said, since `began_s`.

    `loop` is where the loop of a sampling run was, as the schema has it.
    """

    result: torch.Tensor
    spans: Sequence[Span] = ()
    began_s: float = 0.0
    loop: Mapping[str, str] | None = None


@dataclass(frozen=True, kw_only=True)
class BenchmarkCase:
    """Something to time: `run` returns when its result is there, the devices waited for."""

    name: str
    kind: str
    engine: str
    run: Callable[[], CaseRun]
    plan: ParallelPlan | None = None
    devices: Sequence[Device] = ()
    threads: int | None = None


@dataclass
class Timed:
    """The runs of one case that count. `last` is the last one, `utilisation` what the driver said after it.

    `failed` is what a run of it raised; then it has no further run, and no row.
    """

    case: BenchmarkCase
    run_s: list[float] = field(default_factory=list)
    busy_s: list[float] = field(default_factory=list)
    last: CaseRun | None = None
    utilisation: Mapping[int, float] = field(default_factory=dict)
    failed: Exception | None = None

    def add(self, seconds: float, run: CaseRun, *, busy: Mapping[int, float]) -> None:
        """Take in one run, and how `busy` the driver said each rank's device was in it."""
        self.last, self.utilisation = run, busy
        self.run_s.append(seconds)
        parts = rank_parts(run.spans, self.case.devices, began_s=run.began_s)
        took = [sum(part["busy_s"]) for part in parts if "busy_s" in part]
        self.busy_s += [max(took)] if took else []


def interleave(
    cases: Sequence[BenchmarkCase],
    *,
    warmup: int,
    runs: int,
    told: Callable[[str, int, int], None] | None = None,
    left_out: tuple[type[Exception], ...] = (),
) -> list[Timed]:
    """Run every case `warmup` times, then `runs` times that count, each round all of them in turn.

    Each round begins with the case after the one that the last began with, so that none always has the same before
    it. `told(name, run, of)` is called before each run. A case whose run raises one of `left_out` is left out from
    there on. Raises `ValueError` for fewer than one run, what else a run raises, and what the first raised where none
    is left.
    """
    if runs < 1 or warmup < 0:
        raise ValueError(f"runs={runs}, warmup={warmup}; use at least 1 run and 0 warm-up")
    timed = [Timed(each) for each in cases]
    for count in range(warmup + runs):
        first = count % len(timed)
        for each in timed[first:] + timed[:first]:
            if each.failed is not None:
                continue
            if told is not None:
                told(each.case.name, count + 1, warmup + runs)
            began = time.perf_counter()
            try:
                run = each.case.run()
            except left_out as error:
                log.warning("%s failed", each.case.name, exc_info=error)
                each.failed = _without_frames(error)
                continue
            seconds = time.perf_counter() - began
            if count >= warmup:
                each.add(seconds, run, busy=utilisation(each.case.devices, over_s=seconds))
    errors = [each.failed for each in timed if each.failed is not None]
    if len(errors) == len(timed):
        raise errors[0]
    return timed


def table(timed: Sequence[Timed], *, error: Error) -> tuple[list[dict], list[str]]:
    """A row for each case that did not fail, as the schema has them, and warnings.

    `error(result, reference)` holds each against one rank's result; one that is no number becomes a warning. Of a
    pipeline it is no error but what keys a step old change, and is called so.
    """
    rows = []
    warnings = [
        f"{each.case.name} failed and is left out: {(str(each.failed).splitlines() or [type(each.failed).__name__])[0]}"
        for each in timed
        if each.failed is not None
    ]
    timed = [each for each in timed if each.failed is None]
    reference = next((each.last.result for each in timed if each.case.kind == "one_rank" and each.last), None)
    for each in timed:
        row = _row(each)
        if reference is not None and each.last is not None and each.case.kind != "one_rank":
            found = error(each.last.result, reference)
            if math.isfinite(found):
                pipeline = each.case.plan is not None and each.case.plan.pipefusion > 1
                row["stale_difference" if pipeline else "error"] = found
            else:
                warnings.append(f"{each.case.name}: the result or one rank's holds NaN or infinity")
        rows.append(row)
    compare(rows)
    return rows, warnings


def _without_frames(error: Exception) -> Exception:
    """The same error, without the frames of it and of what led to it: they hold the run's tensors."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def _row(timed: Timed) -> dict:
    of, last = timed.case, timed.last
    if last is None:
        raise ValueError(f"{of.name} has no run that counts; use at least 1 run")
    row = case(of.name, of.kind, of.engine, timed.run_s, threads=of.threads)
    if of.plan is not None:
        row["plan"] = plan_part(of.plan)
    if last.loop is not None:
        row["loop"] = dict(last.loop)
    if timed.busy_s:
        row["slowest_rank_s"] = statistics.median(timed.busy_s)
    ranks = rank_parts(last.spans, of.devices, began_s=last.began_s, utilisation=timed.utilisation)
    return row | ({"ranks": ranks} if ranks else {})
