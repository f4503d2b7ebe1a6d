"""PipeFusion of models that ComfyUI's own modules compute, in real workers: hybrids, controls, cancelling, bad input.

That a pipeline without other axes computes what it should after its warm-up is test_hosted_pipelines.py's; here all
other plans of as many patches must compute the same, and whole sampling runs, in which a pipeline stays full between
steps, each number of those in which it does not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rounding import ROUNDING

from host.hosted_runs import FLUX, SD35, WAN, Model, asking, euler, heun, host_loop, make_run
from host.tiny_hosted import call
from parallel_runtime.checkpoint import ModelSpec
from parallel_runtime.errors import PoolError
from parallel_runtime.model_call import CallPlace
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.calls import WorkerLoopRun
from parallel_runtime.pool.pool import Pool
from parallel_runtime.proof import relative_error

pytestmark = pytest.mark.slow

STEPS = 3
TEXTS = (7, 12)  # of the two conditionings, so they are two calls
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
            told = {**made.options, **(options or {})}
            calls.append(replace(made, place=CallPlace(run, f"text of {text}"), options=told))
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
        assert relative_error(got, want) <= ROUNDING
    got = run_steps(pool, wan, ParallelPlan.parse(name), run=name, batch=batch)
    assert relative_error(got[0], one[batch][0]) <= ROUNDING
    for step in range(1, STEPS):
        assert relative_error(got[step], stale[batch][step]) <= ROUNDING
        assert relative_error(got[step], one[batch][step]) > DIFFERENT


@pytest.mark.parametrize("name", ["pipefusion=2,ulysses=2", "pipefusion=2,patches=4"])
def test_without_the_keys_of_others_it_is_wrong(pool: Pool, wan: ModelSpec, stale: dict, name: str) -> None:
    alone = {"local_attention": True}
    got = run_steps(pool, wan, ParallelPlan.parse(name), run=f"alone {name}", options=alone)
    assert relative_error(got[2], stale[1][2]) > 10 * DIFFERENT


def test_fewer_tokens_than_patches_are_refused_with_both_numbers(pool: Pool, wan: ModelSpec, stale: dict) -> None:
    plan = ParallelPlan(pipefusion=2, patches=4)
    with pytest.raises(PoolError, match="patches=4 is more than the tokens of this call, 2 of x; use fewer patches"):
        pool.run(wan, plan, [call(0, text=7, size=(1, 2, 4))])
    again = run_steps(pool, wan, plan, run="after few")
    assert relative_error(again[2], stale[1][2]) <= ROUNDING


TWO = "pipefusion=2,patches=4"
IDLE = f"{TWO},cfg=2,weights=sharded"  # with one conditioning of one image
# By what is special about it: a model, a plan, what the run is made of.
RUNS: dict[str, tuple[Model, str, dict[str, Any]]] = {
    "Wan, three stages": (WAN, "pipefusion=3,patches=4", {}),
    "Flux.1": (FLUX, TWO, {"texts": (7,)}),
    "SD3.5, ranks share a patch": (SD35, "pipefusion=2,patches=3,ulysses=2", {}),
    "a side for each group": (WAN, f"{TWO},cfg=2", {}),
    "a group without images, whose weights the other one gathers": (FLUX, IDLE, {"texts": (7,)}),
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
def test_a_full_pipeline_computes_what_an_empty_one_does(pool: Pool, models: Path, name: str) -> None:
    model, written, made = RUNS[name]
    spec, plan, shown = model.write(models), ParallelPlan.parse(written), list[torch.Tensor]()
    run = sampled(model, **made)
    got = pool.sample(spec, plan, run, on_step=lambda _, latent: shown.append(latent.clone()))
    assert [each.drained for each in got.ran] == [None] * plan.ranks
    want, previews = step_by_step(pool, spec, plan, run, name=name.replace(" ", "_"))
    assert relative_error(got.out, want) <= ROUNDING
    for seen, preview in zip(shown, previews, strict=True):
        assert relative_error(seen, preview) <= ROUNDING
    other, _ = step_by_step(pool, spec, plan, run, name="other_keys", keys_of=2)
    assert relative_error(got.out, other) > DIFFERENT, "keys of the step before last would pass"


MIXED = "WanModel mixes the tokens of patches outside of its blocks"
OTHERS = "the prompts' patches are of other parts of the latent"


@pytest.mark.parametrize(
    ("model", "name", "why"),
    [(WAN, "pipefusion=3,patches=4", MIXED), (FLUX, TWO, OTHERS), (FLUX, f"{TWO},cfg=2", OTHERS)],
)
def test_where_patches_share_numbers_the_pipeline_is_empty_between_steps_and_says_why(
    pool: Pool, models: Path, model: Model, name: str, why: str
) -> None:
    """Wan fills up an odd height with the first row's numbers, so tokens of the last patch are made of the first's.

    Flux's first prompt has a reference, which takes half of its patches; in one batch group with the other, or two.
    """
    spec, plan = model.write(models), ParallelPlan.parse(name)
    run = sampled(model, size=(1, 7, 12) if model is WAN else ())
    if model is FLUX:
        of_references = sampled(replace(FLUX, more={**FLUX.more, "ref_latents": (1, *FLUX.latent)}))
        run = replace(run, conds=(of_references.conds[0], run.conds[1]))
    got = pool.sample(spec, plan, run)
    assert {each.drained for each in got.ran} == {None, why}
    want, _ = step_by_step(pool, spec, plan, run, name="drained")
    assert relative_error(got.out, want) <= ROUNDING


class Cancelled(Exception):  # noqa: N818  stands for the caller's own
    """What the caller raises to cancel."""


@pytest.mark.parametrize(("name", "texts"), [("pipefusion=3,patches=4", TEXTS), (IDLE, TEXTS[:1])])
def test_a_cancelled_run_leaves_nothing_in_the_links(
    pool: Pool, wan: ModelSpec, name: str, texts: tuple[int, ...]
) -> None:
    plan = ParallelPlan.parse(name)
    run = sampled(WAN, recurrence=euler(20, timesteps=1.0), texts=texts)
    pool.start()
    generation, steps = pool.generation, list[int]()

    def cancel() -> None:
        if len(steps) > 2:
            raise Cancelled

    with pytest.raises(Cancelled):
        pool.sample(wan, plan, run, on_step=lambda step, _: steps.append(step), check_cancelled=cancel)
    short = sampled(WAN, texts=texts)
    again, want = pool.sample(wan, plan, short), step_by_step(pool, wan, plan, short, name="after")[0]
    assert relative_error(again.out, want) <= ROUNDING and len(steps) < 20
    assert pool.generation == generation
