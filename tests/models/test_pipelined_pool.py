"""PipeFusion of a model that ComfyUI's own modules compute, in real workers: hybrids, controls, cancelling, bad input.

That a pipeline without other axes computes what it should after its warm-up is test_hosted_pipelines.py's; here all
other plans of as many patches must compute the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch

from host.tiny_hosted import call
from parallel_runtime.checkpoint import ModelSpec
from parallel_runtime.errors import PoolError
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.pool import Pool
from parallel_runtime.proof import relative_error

pytestmark = pytest.mark.slow

STEPS = 3
TEXTS = (7, 12)  # of the two conditionings, so they are two calls
TOLERANCE = 1e-5  # fp32 sums in another order
DIFFERENT = 1e-4  # what older keys or a missing exchange must move
PLANS = (
    *("pipefusion=3,patches=4", "pipefusion=2,patches=4,ulysses=2,weights=sharded", "pipefusion=2,patches=4,ring=2"),
    *("pipefusion=2,patches=4,cfg=2", "pipefusion=2,patches=4,data=2", "pipefusion=2,patches=4,weights=offloaded"),
)


def run_steps(
    pool: Pool,
    spec: ModelSpec,
    plan: ParallelPlan,
    *,
    run: str,
    options: Mapping[str, object] | None = None,
    batch: int = 1,
    texts: Sequence[int] = TEXTS,
) -> list[torch.Tensor]:
    """The results of each step, both conditionings' side by side; `run` is the sampling run's name."""
    found = []
    for step in range(STEPS):
        calls = []
        for text in texts:
            made = call(step, text=text, batch=batch)
            told = {**made.options, **(options or {}), "place": {"run": run, "key": f"text of {text}"}}
            calls.append(replace(made, options=told))
        found.append(torch.cat(pool.run(spec, plan, calls).outs, 1))
    return found


@pytest.fixture(scope="module")
def one(four_ranks: Pool, wan: ModelSpec) -> dict[int, list[torch.Tensor]]:
    """By batch, what ComfyUI's module computes in one process."""
    return {batch: run_steps(four_ranks, wan, ParallelPlan(), run="one", batch=batch) for batch in (1, 2)}


@pytest.fixture(scope="module")
def stale(four_ranks: Pool, wan: ModelSpec) -> dict[int, list[torch.Tensor]]:
    """By batch, what two stages compute with one step of warm-up."""
    plan = ParallelPlan(pipefusion=2, patches=4)
    return {batch: run_steps(four_ranks, wan, plan, run=f"stale {batch}", batch=batch) for batch in (1, 2)}


@pytest.mark.parametrize("name", PLANS)
def test_every_plan_is_exact_in_warm_up_and_computes_the_same_after_it(
    pool: Pool, wan: ModelSpec, one: dict, stale: dict, name: str
) -> None:
    batch = 2 if "data" in name else 1
    warm = ParallelPlan.parse(f"{name},warmup_steps={STEPS}")
    for got, want in zip(run_steps(pool, wan, warm, run=f"warm {name}", batch=batch), one[batch], strict=True):
        assert relative_error(got, want) <= TOLERANCE
    got = run_steps(pool, wan, ParallelPlan.parse(name), run=name, batch=batch)
    assert relative_error(got[0], one[batch][0]) <= TOLERANCE
    for step in range(1, STEPS):
        assert relative_error(got[step], stale[batch][step]) <= TOLERANCE
        assert relative_error(got[step], one[batch][step]) > DIFFERENT


@pytest.mark.parametrize("name", ["pipefusion=2,ulysses=2", "pipefusion=2,patches=4"])
def test_without_the_keys_of_others_it_is_wrong(pool: Pool, wan: ModelSpec, stale: dict, name: str) -> None:
    alone = {"local_attention": True}
    got = run_steps(pool, wan, ParallelPlan.parse(name), run=f"alone {name}", options=alone)
    assert relative_error(got[2], stale[1][2]) > 10 * DIFFERENT


class Cancelled(Exception):  # noqa: N818  stands for the caller's own
    """What the caller raises to cancel."""


def test_a_cancelled_step_in_the_middle_of_a_run_leaves_nothing(pool: Pool, wan: ModelSpec, stale: dict) -> None:
    plan = ParallelPlan(pipefusion=2, patches=4)
    many = [
        replace(made, options={**made.options, "place": {"run": "cancelled", "key": str(number)}})
        for number, made in enumerate([call(0, text=TEXTS[0])] * 40)
    ]
    pool.run(wan, plan, many)
    generation, asked = pool.generation, []

    def cancel() -> None:
        asked.append(pool.state)
        if asked.count("busy") > 1:
            raise Cancelled

    with pytest.raises(Cancelled):
        pool.run(wan, plan, many, check_cancelled=cancel)
    again = run_steps(pool, wan, plan, run="after")
    assert all(relative_error(got, want) <= TOLERANCE for got, want in zip(again, stale[1], strict=True))
    assert pool.generation == generation


def test_fewer_tokens_than_patches_are_refused_with_both_numbers(pool: Pool, wan: ModelSpec, stale: dict) -> None:
    plan = ParallelPlan(pipefusion=2, patches=4)
    with pytest.raises(PoolError, match="patches=4 is more than the tokens of this call, 2 of x; use fewer patches"):
        pool.run(wan, plan, [call(0, text=7, size=(1, 2, 4))])
    again = run_steps(pool, wan, plan, run="after few")
    assert relative_error(again[2], stale[1][2]) <= TOLERANCE
