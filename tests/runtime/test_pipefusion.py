"""PipeFusion: exact while every step is warm-up, equal to one process of the same staleness after, and not the same."""

from dataclasses import replace

import pytest
import torch

from parallel_runtime.checkpoint import ModelSpec
from parallel_runtime.cli.workload import relative_error
from parallel_runtime.errors import RequestCancelledError
from parallel_runtime.models.flux.config import FluxConfig
from parallel_runtime.models.flux.family import FluxModel
from parallel_runtime.models.flux.reference import ReferenceModel
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.in_worker_sampling import InWorkerRun
from parallel_runtime.pool.pool import Pool
from parallel_runtime.sampler_recurrence import RecurrenceStep, SamplerRecurrence
from runtime.in_worker_runs import host_loop, make_run
from runtime.stale_model import StaleModel
from runtime.zero_timestep_model import ZeroTimestepModel

pytestmark = pytest.mark.slow

# fp32 sums in another order, four calls of the model after one another
TOLERANCE = 1e-5
# The random model's latent moves a lot from step to step; a pipeline that never went stale would be below TOLERANCE.
DIFFERENT = 1e-3
STEPS = 3
KINDS = {
    "one side": {},
    "two sides of unequal texts, three images": {"batch": 3, "sides": (7, 12)},
    "a mask, references, an odd length": {"mask": True, "references": 31, "sides": (5, 5)},
}
PLANS = (
    "pipefusion=2",
    "pipefusion=2,patches=5",
    "pipefusion=3",
    "pipefusion=4,patches=7",
    "pipefusion=2,ulysses=2",
    "pipefusion=2,ring=2,patches=3",
    "pipefusion=2,ring=2,ulysses=2",
    "pipefusion=2,ulysses=3",
    "pipefusion=3,cfg=2",
    "pipefusion=2,cfg=3",
    "pipefusion=2,data=2,cfg=2",
)


def sample(
    pool: Pool, spec: ModelSpec, plan: ParallelPlan, run: InWorkerRun
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """The result and the denoised latent of every step, which come in order."""
    seen: dict[int, torch.Tensor] = {}
    result = pool.sample(spec, plan, run, on_step=lambda step, x: seen.setdefault(step, x.clone()))
    assert list(seen) == list(range(STEPS))
    return result.out, tuple(seen.values())


def stale_model(spec: ModelSpec, run: InWorkerRun, *, patches: int, warm_calls: int = 1) -> StaleModel:
    """The reference model of a run whose sides share the latent and so its patches."""
    longest = max(cond.tensors["txt"].shape[1] for cond in run.conds)
    return StaleModel(spec.path, patches=patches, warm_calls=warm_calls, sides=len(run.conds), longest_text=longest)


# Every plan runs one kind, in turn; all kinds under all plans are left to the full tier.
CASES = [
    *(pytest.param(kind, PLANS[index :: len(KINDS)], id=kind) for index, kind in enumerate(KINDS)),
    *(pytest.param(kind, PLANS, id=f"{kind}, every plan", marks=pytest.mark.full) for kind in KINDS),
]


@pytest.mark.parametrize(("kind", "names"), CASES)
def test_a_pipeline_in_warm_up_equals_one_process(
    eight_ranks: Pool, deep: ModelSpec, deep_config: FluxConfig, kind: str, names: tuple[str, ...]
) -> None:
    run = make_run(deep_config, **KINDS[kind])
    expected, previews = host_loop(ReferenceModel(deep.path), run)
    errors = {}
    for name in names:
        plan = ParallelPlan.parse(f"{name},warmup_steps={STEPS}")
        out, seen = sample(eight_ranks, deep, plan, run)
        errors[name] = max(map(relative_error, (out, *seen), (expected, *previews)))
    assert not {name: error for name, error in errors.items() if not error <= TOLERANCE}, errors


@pytest.mark.parametrize(("kind", "names"), CASES)
def test_after_the_warm_up_it_is_as_stale_as_the_same_in_one_process(
    eight_ranks: Pool, deep: ModelSpec, deep_config: FluxConfig, kind: str, names: tuple[str, ...]
) -> None:
    run = make_run(deep_config, **KINDS[kind])
    synchronous, _ = host_loop(ReferenceModel(deep.path), run)
    errors, differences = {}, {}
    plans = [ParallelPlan.parse(name) for name in names]
    for patches in sorted({plan.num_patches for plan in plans}):
        stale = stale_model(deep, run, patches=patches)
        expected, previews = host_loop(stale, run)
        for plan in plans:
            if plan.num_patches == patches:
                out, seen = sample(eight_ranks, deep, plan, run)
                name = plan.describe()
                errors[name] = max(map(relative_error, (out, *seen), (expected, *previews)))
                differences[name] = relative_error(out, synchronous)
    assert len(errors) == len(names)
    assert not {name: error for name, error in errors.items() if not error <= TOLERANCE}, errors
    assert all(difference > DIFFERENT for difference in differences.values()), differences


def test_another_length_of_warm_up_is_another_result(
    eight_ranks: Pool, deep: ModelSpec, deep_config: FluxConfig
) -> None:
    run, outs = make_run(deep_config), []
    for warmup_steps, warm_calls in ((1, 1), (2, 2)):  # of the recurrence's four calls, the last two are one step
        stale = stale_model(deep, run, patches=2, warm_calls=warm_calls)
        plan = ParallelPlan(pipefusion=2, warmup_steps=warmup_steps)
        outs.append(sample(eight_ranks, deep, plan, run)[0])
        assert relative_error(outs[-1], host_loop(stale, run)[0]) <= TOLERANCE
    assert relative_error(outs[0], outs[1]) > DIFFERENT


def test_rows_at_timestep_zero_and_residuals_go_through_stages(
    eight_ranks: Pool, deep: ModelSpec, deep_config: FluxConfig
) -> None:
    plain = make_run(deep_config, references=30)
    rows = plain.conds[0].tensors["img"].shape[1]
    zero_timestep = (torch.arange(rows) >= plain.shape[1]).to(torch.uint8)
    shape, generator = (1, plain.shape[1], deep_config.hidden_size), torch.Generator().manual_seed(9)
    more = {
        name: torch.randn(shape, generator=generator) for name in ("control_in.0", "control_out.0", "control_out.1")
    }
    cond = replace(
        plain.conds[0],
        tensors={**plain.conds[0].tensors, "zero_timestep_rows": zero_timestep, **more},
        options={"control_in": [None, 0], "control_out": [0, 1]},
    )
    run = replace(plain, conds=(cond,))
    whole = {name: torch.cat((tensor, torch.zeros(1, 30, deep_config.hidden_size)), 1) for name, tensor in more.items()}
    double = [torch.zeros(1, rows, deep_config.hidden_size), whole["control_in.0"]]
    single = [whole["control_out.0"], whole["control_out.1"]]
    exact = ZeroTimestepModel(deep.path)
    expected, _ = host_loop(lambda tensors: exact(tensors, double, single), run)
    for left_out in (
        host_loop(ReferenceModel(deep.path), run)[0],
        host_loop(exact, run)[0],
        host_loop(lambda tensors: exact(tensors, double, single[::-1]), run)[0],
    ):
        assert relative_error(left_out, expected) > DIFFERENT
    for name in ("pipefusion=2", "pipefusion=3,ring=2", "pipefusion=2,ulysses=2,patches=3"):
        plan = ParallelPlan.parse(f"{name},warmup_steps={STEPS}")
        assert relative_error(eight_ranks.sample(deep, plan, run).out, expected) <= TOLERANCE


@pytest.mark.parametrize("plan", ["pipefusion=2", "pipefusion=2,ulysses=2", "pipefusion=2,cfg=2"])
def test_without_the_exchange_the_latent_is_wrong(
    eight_ranks: Pool, deep: ModelSpec, deep_config: FluxConfig, plan: str
) -> None:
    run = make_run(deep_config, sides=(7, 7))
    alone = tuple(replace(cond, options={"local_attention": True}) for cond in run.conds)
    stale = stale_model(deep, run, patches=2)
    out, _ = sample(eight_ranks, deep, ParallelPlan.parse(plan), replace(run, conds=alone))
    assert relative_error(out, host_loop(stale, run)[0]) > 0.01


def test_a_cancelled_pipeline_leaves_nothing_in_flight(
    eight_ranks: Pool, deep: ModelSpec, deep_config: FluxConfig
) -> None:
    states = [RecurrenceStep(given=True, sigma=1.0, timestep=1.0)]
    states += [RecurrenceStep(inputs=((k, 0.9),), denoised=((k, 0.1),), sigma=0.5, timestep=0.5) for k in range(39)]
    recurrence = SamplerRecurrence(states=(*states, RecurrenceStep(denoised=((39, 1.0),))), step_ends=tuple(range(40)))
    one = make_run(deep_config, sides=(5, 6))
    long = replace(one, recurrence=recurrence, given={0: one.given[0]})
    for name in ("pipefusion=3,patches=4", "pipefusion=2,cfg=2", "pipefusion=2,ulysses=2,patches=5"):
        plan, seen = ParallelPlan.parse(name), []

        def stop(step: int, _: torch.Tensor, seen: list[int] = seen) -> None:
            seen.append(step)
            if step == 3:
                raise RequestCancelledError("enough")

        with pytest.raises(RequestCancelledError):
            eight_ranks.sample(deep, plan, long, on_step=stop)
        assert seen == [0, 1, 2, 3]
        stale = stale_model(deep, one, patches=plan.num_patches)
        assert relative_error(sample(eight_ranks, deep, plan, one)[0], host_loop(stale, one)[0]) <= TOLERANCE
    assert eight_ranks.generation == 1


def test_runs_that_do_not_fit_the_stages_are_refused(
    eight_ranks: Pool, deep: ModelSpec, deep_config: FluxConfig
) -> None:
    run = make_run(deep_config)
    with pytest.raises(ValueError, match="warmup_steps=4 is more than the run's 3 step.*use at most 3"):
        eight_ranks.sample(deep, ParallelPlan(pipefusion=2, warmup_steps=4), run)
    with pytest.raises(ValueError, match="patches=73 is more than the image's 72 tokens"):
        eight_ranks.sample(deep, ParallelPlan(pipefusion=2, patches=73), run)
    with pytest.raises(ValueError, match="pipefusion=5 is more stages than the model's 4 blocks"):
        FluxModel(deep_config).check_plan(ParallelPlan(pipefusion=5))
