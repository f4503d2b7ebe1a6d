"""Shares of unequal devices, corrected between runs by what their ranks took in the one before."""

from collections.abc import Callable
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
from comfy.test_run_context import new_run as new_run
from comfy.test_run_context import run_context as run_context
from made_replies import WORK

SHARES, SPEEDS, GIB = (10, 8), (1.0, 0.4), 2**30


@pytest.fixture
def ran(new_run, module_of_pack) -> Callable[..., Any]:
    """A run under ulysses 2 of such shares, whose ranks computed as fast as `speeds`, each step in two requests."""
    plan_of = module_of_pack("parallel_runtime.plan").ParallelPlan
    step_of = module_of_pack("parallel_runtime.wire.replies").RankStep
    memory_of = module_of_pack("parallel_runtime.planner.memory").PlannedMemory
    choose, cost = (module_of_pack(f"parallel_runtime.planner.{name}") for name in ("choose", "cost"))
    seconds = {each.name: 1.0 for each in fields(cost.Cost)}

    def make(shares: tuple, speeds: tuple = SPEEDS, *, timed: bool = True, **degrees: int) -> Any:
        plan = plan_of(**(degrees or {"ulysses": 2}))
        memory = memory_of(weights=GIB, activations=2 * GIB, buffers=0, runtime=0)
        cost_s = cost.Cost(**{name: value for name, value in seconds.items() if name != "bound"})
        row = choose.Prediction(plan=plan, cost=cost_s, memory=memory, run_s=1.0, fits=True)
        run = new_run("/a.safetensors")
        run = replace(run, decision=replace(run.decision, plan=plan.with_shares(shares), table=(row,)))
        slowest_s = max(share / speed for share, speed in zip(shares, speeds, strict=True))
        for first in (5.0, 0.0, 0.0):  # the first request takes longer, and is not counted
            ranks = []
            for share, speed in zip(shares, speeds, strict=True):
                regions = {"communication_s": slowest_s - share / speed} if timed else None
                step = step_of(**WORK, began_s=0.0, step_s=slowest_s + first, regions=regions)
                ranks.append(SimpleNamespace(ran=step))
            run.recorder.requests.append(SimpleNamespace(ranks=ranks))
        return run

    return make


@pytest.fixture
def book(module_of_pack) -> Any:
    return module_of_pack("nodes.host.sampling.corrected_shares").CorrectedShares()


def test_a_run_that_was_measured_corrects_the_next_ones_shares_and_says_so(ran, book) -> None:
    free = [80 * GIB, 80 * GIB]
    book.after(first := ran(SHARES), SHARES, free)
    assert book.now == (10, 4) and book.told(first.decision) is first.decision
    second = ran(book.now)
    text = "shares 10:4, by what ranks took in the run before"
    assert book.told(second.decision).reasons[-1] == text
    sharded = replace(second.decision, plan=replace(second.plan, weights="sharded"))
    assert book.told(sharded).reasons[-1] == f"{text}; the weights stay as they were cut"
    book.after(second, book.now, free)
    assert book.now == (10, 4)  # less than a tenth is left to gain
    book.after(ran(book.now, (1.0, 0.8)), book.now, free)
    assert book.now == (10, 4)  # a split that was given up does not come back
    book.after(ran(book.now, (1.0, 1.0)), book.now, free)
    assert book.now == (10, 10)


def test_what_says_nothing_of_speed_or_leaves_a_rank_no_room_changes_nothing(ran, book) -> None:
    free = [80 * GIB, 80 * GIB]
    book.after(ran(SHARES, timed=False), SHARES, free)
    book.after(ran(SHARES, cfg=2), SHARES, free)
    book.after(ran((1, 1)), (), free)
    book.after(replace(ran(SHARES), step_cache=0.1), SHARES, free)
    book.after(replace(ran(SHARES), whole=True), SHARES, free)
    book.after(ran(SHARES), SHARES, [3.5 * GIB, 80 * GIB])  # its share is 10 of 14 of 4 GiB
    assert book.now == ()
    book.after(ran(SHARES), SHARES, [4.5 * GIB, 80 * GIB])
    assert book.now == (10, 4)
