"""A whole sampling run inside the pool equals the same loop around one process of the unmodified diffusers model.

The reference model calls the model as a host loop does, step by step, in the order of operations that ComfyUI has.
"""

import time
from dataclasses import replace

import pytest
import torch

from parallel_runtime.checkpoint import ModelSpec
from parallel_runtime.cli.workload import relative_error
from parallel_runtime.errors import RequestCancelledError
from parallel_runtime.models.flux.config import FluxConfig
from parallel_runtime.models.flux.reference import ReferenceModel
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.calls import ModelCall
from parallel_runtime.pool.in_worker_sampling import InWorkerRun
from parallel_runtime.pool.pool import Pool
from parallel_runtime.sampler_recurrence import RecurrenceStep, SamplerRecurrence
from runtime.in_worker_runs import conditioning, host_loop, make_run, read_otherwise

pytestmark = pytest.mark.slow

# fp32 sums in another order, four calls of the model after one another
TOLERANCE = 1e-5
PLANS = (
    "ulysses=1",
    "ulysses=2",
    "ring=2",
    "ring=3",
    "ulysses=2,ring=2",
    "cfg=2",
    "cfg=2,ulysses=2",
    "cfg=3",
    "data=2",
    "data=2,cfg=2,ring=2",
)


KINDS = {
    "one side": {},
    "two sides of unequal texts, three images": {"batch": 3, "sides": (7, 12)},
    "a mask and references": {"mask": True, "references": 30, "sides": (5, 5)},
}


# Every plan runs one kind, in turn; all kinds under all plans are left to the full tier.
CASES = [
    *(pytest.param(kind, PLANS[index :: len(KINDS)], id=kind) for index, kind in enumerate(KINDS)),
    *(pytest.param(kind, PLANS, id=f"{kind}, every plan", marks=pytest.mark.full) for kind in KINDS),
]


@pytest.mark.parametrize(("kind", "names"), CASES)
def test_every_plan_samples_as_a_host_loop_does(
    eight_ranks: Pool,
    sample: ModelSpec,
    reference_model: ReferenceModel,
    config: FluxConfig,
    kind: str,
    names: tuple[str, ...],
) -> None:
    run = make_run(config, **KINDS[kind])
    expected, previews = host_loop(reference_model, run)
    errors = {}
    for name in names:
        seen: list[torch.Tensor] = []
        plan = ParallelPlan.parse(name)
        result = eight_ranks.sample(sample, plan, run, on_step=lambda step, x, s=seen: s.append((step, x.clone())))
        assert [step for step, _ in seen] == [0, 1, 2]
        errors[name] = max(
            relative_error(result.out, expected),
            *(relative_error(x, preview) for (_, x), preview in zip(seen, previews, strict=True)),
        )
    assert not {name: error for name, error in errors.items() if not error <= TOLERANCE}, errors


@pytest.mark.parametrize("name", ["cfg=2,ulysses=2", "pipefusion=2,patches=2,warmup_steps=3"])
def test_a_model_sampling_that_is_no_flow_is_read_by_its_numbers(
    eight_ranks: Pool, sample: ModelSpec, reference_model: ReferenceModel, config: FluxConfig, name: str
) -> None:
    flow = make_run(config, sides=(7, 12), mask=True)
    run = read_otherwise(flow)
    result = eight_ranks.sample(sample, ParallelPlan.parse(name), run)
    expected = host_loop(reference_model, run)[0]
    assert relative_error(result.out, expected) <= TOLERANCE
    assert relative_error(host_loop(reference_model, flow)[0], expected) > 0.01


@pytest.mark.parametrize("name", ["ulysses=2", "cfg=2"])
def test_without_the_exchange_the_latent_is_wrong(
    eight_ranks: Pool, sample: ModelSpec, reference_model: ReferenceModel, config: FluxConfig, name: str
) -> None:
    run = make_run(config, sides=(7, 7))
    wrong = tuple(
        ModelCall(
            tensors=cond.tensors,
            out_shape=cond.out_shape,
            out_dtype=cond.out_dtype,
            options={"local_attention": True},
        )
        for cond in run.conds
    )
    broken = InWorkerRun(
        recurrence=run.recurrence, conds=wrong, cfg=1.5 if name == "cfg=2" else run.cfg, given=run.given
    )
    result = eight_ranks.sample(sample, ParallelPlan.parse(name), broken)
    assert relative_error(result.out, host_loop(reference_model, run)[0]) > 0.01


def test_cancelling_takes_effect_within_a_step_and_the_next_run_is_right(
    eight_ranks: Pool, sample: ModelSpec, reference_model: ReferenceModel, config: FluxConfig
) -> None:
    states = [RecurrenceStep(given=True, sigma=1.0, timestep=1.0)]
    states += [RecurrenceStep(inputs=((k, 0.9),), denoised=((k, 0.1),), sigma=0.5, timestep=0.5) for k in range(39)]
    states += [RecurrenceStep(denoised=((39, 1.0),))]
    one = make_run(config)
    long = InWorkerRun(
        recurrence=SamplerRecurrence(states=tuple(states), step_ends=tuple(range(40))),
        conds=one.conds,
        cfg=1.0,
        given={0: one.given[0]},
    )
    seen = []
    plan = ParallelPlan(ulysses=2)

    class Stopped(Exception):  # noqa: N818  as ComfyUI's own interrupt is named
        """What a caller raises to cancel."""

    def check() -> None:
        if len(seen) >= 3:
            raise Stopped

    def on_step(step: int, _: torch.Tensor) -> None:
        seen.append(step)
        time.sleep(0.02)  # ranks wait for it; the caller is asked every 50 ms, so after two or three more steps

    with pytest.raises(Stopped):
        eight_ranks.sample(sample, plan, long, on_step=on_step, check_cancelled=check)
    assert seen[-1] < 10, seen
    result = eight_ranks.sample(sample, plan, one)
    assert relative_error(result.out, host_loop(reference_model, one)[0]) <= TOLERANCE


@pytest.mark.parametrize("name", ["ulysses=2", "cfg=2,weights=sharded", "pipefusion=2,patches=2,warmup_steps=3"])
def test_modulations_that_would_take_too_much_are_computed_call_by_call(
    eight_ranks: Pool, sample: ModelSpec, reference_model: ReferenceModel, config: FluxConfig, name: str
) -> None:
    run = replace(make_run(config, sides=(7, 7)), modulation_bytes=0)
    result = eight_ranks.sample(sample, ParallelPlan.parse(name), run)
    assert relative_error(result.out, host_loop(reference_model, run)[0]) <= TOLERANCE


def timed(run: InWorkerRun) -> InWorkerRun:
    """The same run with its regions timed, which they are only for whoever asks."""
    return replace(run, conds=tuple(replace(cond, options={**cond.options, "timed": True}) for cond in run.conds))


def test_reports_have_a_time_for_every_step(eight_ranks: Pool, sample: ModelSpec, config: FluxConfig) -> None:
    run = make_run(config)
    assert all(rank.regions is None for rank in eight_ranks.sample(sample, ParallelPlan(ulysses=2), run).ran)
    result = eight_ranks.sample(sample, ParallelPlan(ulysses=2), timed(run))
    for rank in result.ran:
        assert len(rank.step_s) == 3
        assert rank.prepare_s > 0
        assert list(rank.began_s) == sorted(rank.began_s)
        for step, whole_s in enumerate(rank.step_s):
            parts = {name: values[step] for name, values in rank.regions.items()}
            assert 0 < parts["communication_s"] < parts["double_blocks_s"] + parts["single_blocks_s"] < whole_s
        assert rank.collectives == 4 * (config.depth + config.depth_single), (
            "so few tokens are gathered, in one message"
        )


@pytest.mark.parametrize("name", ["ulysses=2", "cfg=2", "pipefusion=2,patches=2,warmup_steps=1"])
def test_what_is_taken_from_the_host_and_written_for_it_is_in_the_report(
    eight_ranks: Pool, sample: ModelSpec, config: FluxConfig, name: str
) -> None:
    plan = ParallelPlan.parse(name)
    result = eight_ranks.sample(sample, plan, timed(make_run(config, sides=(7, 7))))
    writers = [rank for rank in result.ran if "gather_s" in rank.regions]
    assert len(writers) == (2 if name == "ulysses=2" else 1)
    for rank in writers:
        assert min(rank.regions["gather_s"]) > 0, "each step's preview"
        assert rank.finish_s > 0, "the result"
        first, second, third = rank.regions["hand_over_s"]
        assert first > 0
        # Noise was made ahead for the third call, of the third step. The last stage makes that latent in the second.
        assert (second > 0, third > 0) == (plan.pipefusion > 1, plan.pipefusion == 1)
    for rank in result.ran:
        prepared = rank.prepare_regions
        assert set(prepared) == {"hand_over_s", "embed_s", "modulation_s"}
        assert min(prepared.values()) > 0
        assert sum(prepared.values()) <= rank.prepare_s, "a part is counted twice, or elsewhere"


def test_what_is_prepared_and_written_last_is_no_part_of_a_step(
    eight_ranks: Pool, sample: ModelSpec, config: FluxConfig
) -> None:
    result = eight_ranks.sample(sample, ParallelPlan(ulysses=2), make_run(config))
    for rank in result.ran:
        parts = rank.prepare_s + sum(rank.step_s) + rank.finish_s + rank.waited_s
        assert parts <= result.wall_s


def test_runs_that_cannot_be_are_refused(config: FluxConfig) -> None:
    run = make_run(config, sides=(7, 7))
    with pytest.raises(ValueError, match="0 conditionings"):
        InWorkerRun(recurrence=run.recurrence, conds=(), cfg=1.0, given=run.given)
    with pytest.raises(ValueError, match="the recurrence needs"):
        InWorkerRun(recurrence=run.recurrence, conds=run.conds, cfg=1.0, given={0: run.given[0]})
    other = conditioning(config, text_tokens=7, batch=1, seed=0, references=3)
    with pytest.raises(ValueError, match="different shapes"):
        InWorkerRun(recurrence=run.recurrence, conds=(run.conds[0], other), cfg=1.0, given=run.given)


def test_a_run_cancelled_by_its_own_step_callback_leaves_the_pool_usable(
    eight_ranks: Pool, sample: ModelSpec, config: FluxConfig
) -> None:
    def stop(step: int, _: torch.Tensor) -> None:
        raise RequestCancelledError(f"enough at step {step}")

    with pytest.raises(RequestCancelledError, match="enough at step 0"):
        eight_ranks.sample(sample, ParallelPlan(ring=2), make_run(config), on_step=stop)
    eight_ranks.sample(sample, ParallelPlan(ring=2), make_run(config))
