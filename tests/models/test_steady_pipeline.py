"""The loop in the ranks of a pipeline that stays full between steps: each number as with a pipeline that does not.

Owns whole sampling runs. What one step of a pipeline computes is test_hosted_pipelines.py's.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from host.hosted_runs import FLUX, SD35, WAN, Model, asking, euler, heun, host_loop, make_run
from parallel_runtime.checkpoint import ModelSpec
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.calls import WorkerLoopRun
from parallel_runtime.pool.pool import Pool
from parallel_runtime.proof import relative_error

pytestmark = pytest.mark.slow

TOLERANCE = 1e-5  # fp32 sums in another order
DIFFERENT = 1e-4  # what older keys must move
TWO = "pipefusion=2,patches=4"
# By what is special about it: a model, a plan, what the run is made of.
RUNS: dict[str, tuple[Model, str, dict[str, Any]]] = {
    "Wan, three stages": (WAN, "pipefusion=3,patches=4", {}),
    "Flux.1": (FLUX, TWO, {"texts": (7,)}),
    "SD3.5, ranks share a patch": (SD35, "pipefusion=2,patches=3,ulysses=2", {}),
    "a side for each group": (WAN, f"{TWO},cfg=2", {}),
    "two calls a step, both sides in one, a mask, two videos": (
        WAN,
        TWO,
        {"recurrence": heun(), "texts": (7, 7), "together": True, "mask": True, "batch": 2},
    ),
}


def sampled(model: Model, **made: Any) -> WorkerLoopRun:
    """Four Euler steps of two calls each, or another run."""
    return make_run(model, **{"recurrence": euler(4, timesteps=1.0), "texts": (7, 12), **made})


def step_by_step(
    pool: Pool, spec: ModelSpec, plan: ParallelPlan, run: WorkerLoopRun, *, name: str, keys_of: int = 1
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The same with the loop here and a request for each call, so that the pipeline is empty between any two steps."""
    ends = run.recurrence.step_ends
    steps_before = [sum(end < call for end in ends) for call in range(run.recurrence.num_calls)]
    calls = sum(before < plan.warmup_steps for before in steps_before)
    return host_loop(asking(pool, spec, replace(plan, warmup_steps=calls), run=name, keys_of=keys_of), run)


@pytest.mark.parametrize("name", RUNS)
def test_a_full_pipeline_computes_what_an_empty_one_does(pool: Pool, tmp_path: Path, name: str) -> None:
    model, written, made = RUNS[name]
    spec, plan, shown = model.write(tmp_path), ParallelPlan.parse(written), list[torch.Tensor]()
    run = sampled(model, **made)
    got = pool.sample(spec, plan, run, on_step=lambda _, latent: shown.append(latent.clone()))
    assert [each.drained for each in got.ran] == [None] * plan.ranks
    want, previews = step_by_step(pool, spec, plan, run, name=name.replace(" ", "_"))
    assert relative_error(got.out, want) <= TOLERANCE
    for seen, preview in zip(shown, previews, strict=True):
        assert relative_error(seen, preview) <= TOLERANCE
    other, _ = step_by_step(pool, spec, plan, run, name="other_keys", keys_of=2)
    assert relative_error(got.out, other) > DIFFERENT, "keys of the step before last would pass"


def test_where_patches_share_numbers_the_pipeline_is_empty_between_steps_and_says_why(
    pool: Pool, wan: ModelSpec
) -> None:
    """Wan fills up an odd height with the first row's numbers, so tokens of the last patch are made of the first's."""
    spec, plan = wan, ParallelPlan.parse("pipefusion=3,patches=4")
    run = sampled(WAN, size=(1, 7, 12))
    got = pool.sample(spec, plan, run)
    assert got.ran[-1].drained == "WanModel mixes the tokens of patches outside of its blocks"
    want, _ = step_by_step(pool, spec, plan, run, name="odd")
    assert relative_error(got.out, want) <= TOLERANCE


class Cancelled(Exception):  # noqa: N818  stands for the caller's own
    """What the caller raises to cancel."""


def test_a_cancelled_run_leaves_nothing_in_the_links(pool: Pool, wan: ModelSpec) -> None:
    spec, plan = wan, ParallelPlan.parse("pipefusion=3,patches=4")
    run = sampled(WAN, recurrence=euler(20, timesteps=1.0))
    generation, steps = pool.generation, list[int]()

    def cancel() -> None:
        if len(steps) > 2:
            raise Cancelled

    with pytest.raises(Cancelled):
        pool.sample(spec, plan, run, on_step=lambda step, _: steps.append(step), check_cancelled=cancel)
    short = sampled(WAN)
    again, want = pool.sample(spec, plan, short), step_by_step(pool, spec, plan, short, name="after")[0]
    assert relative_error(again.out, want) <= TOLERANCE and len(steps) < 20
    assert pool.generation == generation
