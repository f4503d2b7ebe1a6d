"""Runs contenders in turn, so that whatever the machine does meanwhile hits all of them alike, and makes their rows.

Owns the order of runs, the clock around each and the medians. Does not own what a contender runs, nor how two results
are held against each other.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

from ..devices import Device
from ..plan import ParallelPlan
from .build import Span, compare, contender, plan_part, rank_parts

Error: TypeAlias = Callable[[torch.Tensor, torch.Tensor], float]
BLOCKS = ("double_blocks_s", "single_blocks_s")


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one run of a contender gave: its result on the CPU, and of workers what they said, since `began_s`."""

    result: torch.Tensor
    spans: Sequence[Span] = ()
    began_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Contender:
    """Something to time: `run` returns when its result is there, the devices waited for."""

    name: str
    kind: str
    engine: str
    run: Callable[[], Run]
    plan: ParallelPlan | None = None
    devices: Sequence[Device] = ()
    threads: int | None = None


@dataclass
class Timed:
    """The runs of one contender that count. `result` and `last` are of the last one."""

    contender: Contender
    run_s: list[float] = field(default_factory=list)
    busy_s: list[float] = field(default_factory=list)
    blocks_s: list[float] = field(default_factory=list)
    last: Run | None = None

    def add(self, seconds: float, run: Run) -> None:
        """Take in one run."""
        self.last = run
        self.run_s.append(seconds)
        parts = rank_parts(run.spans, self.contender.devices, began_s=run.began_s)
        busy = [sum(part["busy_s"]) for part in parts if "busy_s" in part]
        blocks = [sum(_blocks_s(part)) for part in parts if "regions" in part]
        self.busy_s += [max(busy)] if busy else []
        self.blocks_s += [max(blocks)] if blocks else []


def interleave(
    contenders: Sequence[Contender], *, warmup: int, runs: int, told: Callable[[str, int, int], None] | None = None
) -> list[Timed]:
    """Run every contender `warmup` times, then `runs` times that count, each round all of them in order.

    `told(name, run, of)` is called before each run. Raises `ValueError` for fewer than one run, and what a run raises.
    """
    if runs < 1 or warmup < 0:
        raise ValueError(f"runs={runs}, warmup={warmup}; use at least 1 run and 0 warm-up")
    timed = [Timed(each) for each in contenders]
    for count in range(warmup + runs):
        for each in timed:
            if told is not None:
                told(each.contender.name, count + 1, warmup + runs)
            began = time.perf_counter()
            run = each.contender.run()
            seconds = time.perf_counter() - began
            if count >= warmup:
                each.add(seconds, run)
    return timed


def table(timed: Sequence[Timed], *, error: Error) -> tuple[list[dict], list[str]]:
    """A row a contender, as the schema has them, and warnings.

    `error(result, reference)` holds each against one rank's result; one that is no number becomes a warning.
    """
    rows, warnings = [], []
    reference = next((each.last.result for each in timed if each.contender.kind == "one_rank" and each.last), None)
    for each in timed:
        row = _row(each)
        if reference is not None and each.last is not None and each.contender.kind != "one_rank":
            found = error(each.last.result, reference)
            if math.isfinite(found):
                row["error"] = found
            else:
                warnings.append(f"{each.contender.name}: the result or one rank's holds NaN or infinity")
        rows.append(row)
    compare(rows)
    return rows, warnings


def _row(timed: Timed) -> dict:
    of, last = timed.contender, timed.last
    if last is None:
        raise ValueError(f"{of.name} has no run that counts; use at least 1 run")
    row = contender(of.name, of.kind, of.engine, timed.run_s, threads=of.threads)
    if of.plan is not None:
        row["plan"] = plan_part(of.plan)
    if timed.busy_s:
        row["slowest_rank_s"] = statistics.median(timed.busy_s)
    if timed.blocks_s:
        row |= {"blocks_s": timed.blocks_s, "blocks_median_s": statistics.median(timed.blocks_s)}
    ranks = rank_parts(last.spans, of.devices, began_s=last.began_s)
    return row | ({"ranks": ranks} if ranks else {})


def _blocks_s(part: dict) -> list[float]:
    return [
        sum(step) for step in zip(*(part["regions"][name] for name in BLOCKS if name in part["regions"]), strict=True)
    ]
