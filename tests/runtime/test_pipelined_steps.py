"""A pipeline in the host's loop: exact without a run to belong to, stale within one, never from another's keys."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch

from parallel_runtime.checkpoint import ModelSpec, read_header
from parallel_runtime.cli.workload import relative_error
from parallel_runtime.models.flux.config import FluxConfig
from parallel_runtime.models.flux.reference import ReferenceModel
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.calls import ModelCall
from parallel_runtime.pool.in_worker_sampling import InWorkerRun
from parallel_runtime.pool.kv_cache_tracker import KvCacheTracker
from parallel_runtime.pool.pool import Pool
from runtime.in_worker_runs import host_loop, make_run
from runtime.stale_model import StaleModel

# fp32 sums in another order, four calls of the model after one another
TOLERANCE = 1e-5
DIFFERENT = 1e-3
PLANS = (
    "pipefusion=2",
    "pipefusion=3,patches=5",
    "pipefusion=2,ulysses=2",
    "pipefusion=2,ring=2,ulysses=2",
    "data=2,pipefusion=2",
    "pipefusion=2,ring=2,weights=sharded",
    "data=2,pipefusion=2,ulysses=2,weights=sharded",
)


@pytest.fixture(scope="module")
def run(deep: ModelSpec) -> InWorkerRun:
    """Two sides of unequal texts, two images, a noise mask."""
    config = FluxConfig.from_header(read_header(deep.path))
    return make_run(config, batch=2, sides=(7, 12), mask=True)


def model_of(
    pool: Pool, spec: ModelSpec, plan: ParallelPlan, run: InWorkerRun, name: str | None
) -> Callable[[Mapping], torch.Tensor]:
    """The plan as the reference model is called: one conditioning at a time, which its text's length tells."""

    def model(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        options = {} if name is None else {"pipeline": {"run": name, "key": f"text {tensors['txt'].shape[1]}"}}
        call = ModelCall(tensors=tensors, out_shape=run.conds[0].out_shape, out_dtype=torch.float32, options=options)
        return pool.run(spec, plan, [call]).outs[0]

    return model


@pytest.mark.full
@pytest.mark.slow
def test_a_call_that_belongs_to_no_run_is_exact(eight_ranks: Pool, deep: ModelSpec, run: InWorkerRun) -> None:
    expected, _ = host_loop(ReferenceModel(deep.path), run)
    for name in PLANS:
        plan = ParallelPlan.parse(name)
        assert relative_error(host_loop(model_of(eight_ranks, deep, plan, run, None), run)[0], expected) <= TOLERANCE


@pytest.mark.slow
def test_the_calls_of_a_run_are_as_stale_as_in_one_process(
    eight_ranks: Pool, deep: ModelSpec, run: InWorkerRun
) -> None:
    exact, _ = host_loop(ReferenceModel(deep.path), run)
    expected = {
        patches: host_loop(StaleModel(deep.path, patches=patches, warm_calls=1, sides=2), run)[0] for patches in (2, 5)
    }
    for name in (*PLANS, PLANS[0]):  # another run starts with a warm-up of its own
        plan = ParallelPlan.parse(name)
        out, _ = host_loop(model_of(eight_ranks, deep, plan, run, name), run)
        assert relative_error(out, expected[plan.num_patches]) <= TOLERANCE
        assert relative_error(out, exact) > DIFFERENT


@pytest.mark.slow
def test_both_sides_in_one_request_over_cfg_groups_are_as_stale(
    eight_ranks: Pool, deep: ModelSpec, run: InWorkerRun
) -> None:
    """Batch groups of one conditioning each, and one batch group with both."""
    stale = StaleModel(deep.path, patches=2, warm_calls=2, sides=2)
    generator = torch.Generator().manual_seed(2)
    steps = [torch.randn(run.conds[0].tensors["img"].shape, generator=generator) for _ in range(3)]
    expected = [[stale({**cond.tensors, "img": img}) for cond in run.conds] for img in steps]
    for name in ("pipefusion=2", "pipefusion=2,cfg=2", "pipefusion=2,cfg=2,ulysses=2,weights=sharded"):
        plan = ParallelPlan.parse(f"{name},warmup_steps=2")
        for img, sides in zip(steps, expected, strict=True):
            calls = [
                replace(
                    cond,
                    tensors={**cond.tensors, "img": img},
                    options={"pipeline": {"run": name, "key": f"side {number}"}},
                )
                for number, cond in enumerate(run.conds)
            ]
            outs = eight_ranks.run(deep, plan, calls).outs
            assert all(relative_error(*pair) <= TOLERANCE for pair in zip(outs, sides, strict=True))


def test_keys_of_before_are_used_by_the_same_run_place_and_shape_alone(run: InWorkerRun) -> None:
    book, plan = KvCacheTracker(), ParallelPlan(pipefusion=2)

    def warm(number: int = 0, name: str = "a", key: str = "x", model: int = 1, plan: ParallelPlan = plan) -> bool:
        call = replace(run.conds[number], options={"pipeline": {"run": name, "key": key}})
        (told,) = book.enter([call], [], plan, model)
        book.done()
        return told.warm

    assert warm() and not warm()
    assert warm(key="y") and not warm(key="y") and not warm()
    assert warm(number=1), "another shape"
    assert warm(name="b") and warm(), "another run"
    assert warm(model=2) and warm(plan=ParallelPlan(pipefusion=2, patches=3))
    assert warm() and not warm()
    book.forget()
    assert warm() and not warm()
    book.enter([replace(run.conds[0], options={"pipeline": {"run": "a", "key": "x"}})], [], plan, 1)
    assert warm(), "a request that may not have reached the ranks"


@pytest.mark.parametrize("option", ["a", {"run": "a"}, {"run": "a", "key": "b", "more": 1}])
def test_an_option_that_names_no_run_and_key_is_refused(run: InWorkerRun, option: object) -> None:
    call = replace(run.conds[0], options={"pipeline": option})
    with pytest.raises(ValueError, match="option pipeline is"):
        KvCacheTracker().enter([call], [], ParallelPlan(pipefusion=2), 1)


@pytest.mark.slow
def test_more_patches_than_tokens_are_refused_before_anything_starts(
    eight_ranks: Pool, deep: ModelSpec, run: InWorkerRun
) -> None:
    with pytest.raises(ValueError, match="patches=73 is more than the image's 72 tokens"):
        eight_ranks.run(deep, ParallelPlan(pipefusion=2, patches=73), run.conds)
