"""What a timed run of `bench` finds in the ranks: its own plan's weights alone, and a pipeline past its warm-up."""

from collections.abc import Iterator

import pytest
import torch

from parallel_runtime.checkpoint import ModelSpec, read_header
from parallel_runtime.cli.steady import SteadyPlan, WeightLayouts
from parallel_runtime.cli.verify import PlanRunner
from parallel_runtime.cli.workload import USUAL_STEPS, Workload, relative_error, steps_before
from parallel_runtime.devices import parse_devices
from parallel_runtime.models.flux.config import FluxConfig
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.pool import Pool
from runtime.stale_model import in_mid_run

# fp32 sums in another order: what the design allows any plan
FP32_TOLERANCE = 1e-5
Calls = list[dict[str, torch.Tensor]]
PIPELINE = ParallelPlan(pipefusion=2, warmup_steps=2, patches=3)


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Pool]:
    """A pool of this file's own, since it frees what others may have loaded."""
    with Pool(parse_devices("cpu:2").devices, threads_per_rank=1) as pool:
        yield pool


@pytest.fixture(scope="module")
def calls(sample: ModelSpec) -> Calls:
    """A step's one call."""
    workload = Workload(width=128, height=128, text_tokens=16)
    return workload.calls(FluxConfig.from_header(read_header(sample.path)), 1)


def steady(pool: Pool, spec: ModelSpec, calls: Calls, *plans: ParallelPlan) -> list[SteadyPlan]:
    """Each plan ready to be timed, in turn with the others."""
    places = WeightLayouts.of(pool, spec, plans)
    return [SteadyPlan(places, plan, calls, options={"timed": True}) for plan in plans]


@pytest.mark.slow
def test_the_ranks_hold_the_weights_of_the_plan_that_runs_and_no_other(
    two_ranks: Pool, sample: ModelSpec, calls: Calls
) -> None:
    plans = [ParallelPlan(), ParallelPlan(ulysses=2), ParallelPlan(ulysses=2, weights="sharded"), PIPELINE]
    runners = steady(two_ranks, sample, calls, *plans)
    for turn in (0, 2, 1, 3, 0):
        runners[turn].prepare()
        runners[turn].run()
        kind = plans[turn].layout.kind
        assert [two_ranks.holds(sample, plan) for plan in plans] == [plan.layout.kind == kind for plan in plans]


@pytest.mark.slow
def test_plans_whose_weights_lie_alike_are_not_loaded_again(two_ranks: Pool, sample: ModelSpec, calls: Calls) -> None:
    one, two = steady(two_ranks, sample, calls, ParallelPlan(), ParallelPlan(ulysses=2))
    one.prepare()
    loaded = two_ranks.load(sample)
    for runner in (two, one, two):
        runner.prepare()
        assert two_ranks.load(sample) is loaded


@pytest.mark.slow
def test_a_pipelines_timed_run_uses_keys_of_the_step_before_each_time(
    two_ranks: Pool, sample: ModelSpec, calls: Calls
) -> None:
    stale, exact = in_mid_run(sample.path, calls[0], patches=3, warm_calls=2)
    assert relative_error(stale, exact) > 100 * FP32_TOLERANCE
    (runner,) = steady(two_ranks, sample, calls, PIPELINE)
    for _ in range(2):
        runner.prepare()
        assert relative_error(runner.run()[0], stale) <= FP32_TOLERANCE
    warm = PlanRunner(two_ranks, sample, PIPELINE, options={})
    assert relative_error(warm.run(calls)[0], exact) <= FP32_TOLERANCE, "as every run would be without a warm-up"


def test_the_steps_before_lead_to_the_step_by_euler(calls: Calls) -> None:
    velocity = torch.randn(calls[0]["img"].shape, generator=torch.Generator().manual_seed(3))
    first, second = steps_before(calls, [velocity], 2)
    for call, number in ((first[0], 2), (second[0], 1)):
        sigma = number / USUAL_STEPS
        assert torch.allclose(call["timesteps"], calls[0]["timesteps"] + sigma)
        assert torch.allclose(call["img"] - sigma * velocity, calls[0]["img"], atol=1e-5)
