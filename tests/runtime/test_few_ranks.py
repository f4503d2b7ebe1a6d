"""Every strategy on four ranks and a small model, each held to the reference model: what to run while one works on it.

`test_parity.py` and `test_pipefusion.py` have all plans of up to eight ranks, and all sizes.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from parallel_runtime.checkpoint import ModelSpec, read_header
from parallel_runtime.cli.verify import PlanRunner
from parallel_runtime.cli.workload import Workload, relative_error
from parallel_runtime.devices import parse_devices
from parallel_runtime.models.flux.config import FluxConfig
from parallel_runtime.models.flux.reference import ReferenceModel
from parallel_runtime.parallel.shard import GATHER_BYTES, NEVER, SequenceShard
from parallel_runtime.parallel.traffic import AttentionShape, predict
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.in_worker_sampling import InWorkerRun
from parallel_runtime.pool.pool import Pool
from runtime.in_worker_runs import host_loop, make_run
from runtime.stale_model import StaleModel

# fp32 sums in another order, at most four calls of the model after one another
TOLERANCE = 1e-5
# what a mask that is left out changes at least
DIFFERENT = 1e-3
STEPS = 3  # of `make_run`
ODD = Workload(width=104, height=88, text_tokens=5, batch=2)  # 42 image tokens: no number of ranks divides both
PLANS = ("ulysses=2", "ulysses=4", "ring=2", "ring=3", "ulysses=2,ring=2")
STAGES = ("pipefusion=2,patches=3", "pipefusion=2,ulysses=2", "pipefusion=2,ring=2")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Pool]:
    """Four ranks."""
    with Pool(parse_devices("cpu:4").devices, threads_per_rank=1) as pool:
        yield pool


@pytest.fixture(scope="module")
def config(deep: ModelSpec) -> FluxConfig:
    """Its sizes."""
    return FluxConfig.from_header(read_header(deep.path))


@pytest.fixture(scope="module")
def reference(deep: ModelSpec) -> ReferenceModel:
    """The unmodified diffusers model."""
    return ReferenceModel(deep.path, dtype=torch.float32)


@pytest.mark.parametrize("ungathered", [True, False], ids=["exchanged", "gathered"])
def test_a_plan_equals_the_reference_model_with_and_without_a_mask(
    ranks: Pool, deep: ModelSpec, config: FluxConfig, reference: ReferenceModel, ungathered: bool
) -> None:
    tensors = ODD.tensors(config)
    tokens = ODD.text_tokens + ODD.image_tokens
    masked = {**tensors, "mask": 2 * torch.randn(1, tokens, tokens, generator=torch.Generator().manual_seed(3))}
    plain, expected = reference(tensors), reference(masked)
    assert relative_error(plain, expected) > DIFFERENT
    for name in PLANS:
        runner = PlanRunner(ranks, deep, ParallelPlan.parse(name), options={"ungathered": ungathered})
        assert relative_error(runner(tensors), plain) <= TOLERANCE, name
        assert relative_error(runner(masked), expected) <= TOLERANCE, name


def test_a_plan_sends_what_the_formula_says(ranks: Pool, deep: ModelSpec, config: FluxConfig) -> None:
    blocks = config.depth + config.depth_single
    shape = AttentionShape(
        blocks=blocks, heads=config.num_heads, head_dim=config.head_dim, element_bytes=4, batch=ODD.batch
    )
    for name in PLANS:
        plan = ParallelPlan.parse(name)
        lengths = SequenceShard(ODD.text_tokens, ODD.image_tokens, plan.ranks, 0).lengths
        for ungathered in (True, False):
            runner = PlanRunner(ranks, deep, plan, options={"ungathered": ungathered})
            runner(ODD.tensors(config))
            limit = NEVER if ungathered else GATHER_BYTES
            predicted = predict(shape, lengths=lengths, ring=plan.ring, ulysses=plan.ulysses, limit=limit)
            assert [(rank.collectives, rank.sent_bytes) for rank in runner.ranks] == predicted, name


def test_batch_groups_give_each_row_of_each_call_its_own_result(
    ranks: Pool, deep: ModelSpec, config: FluxConfig, reference: ReferenceModel
) -> None:
    calls = replace(ODD, batch=3).calls(config, 2)
    expected = [reference(call) for call in calls]
    for name in ("cfg=2", "data=2,cfg=2", "cfg=2,ulysses=2"):
        results = PlanRunner(ranks, deep, ParallelPlan.parse(name), options={}).run(calls)
        assert max(map(relative_error, results, expected)) <= TOLERANCE, name


@pytest.mark.parametrize("warmup_steps", [STEPS, 1], ids=["warm-up", "a step old"])
def test_stages_equal_one_process_of_the_same_staleness_with_and_without_a_mask(
    ranks: Pool, deep: ModelSpec, config: FluxConfig, warmup_steps: int
) -> None:
    """The mask has no two columns alike: in another order than that of the keys it is another one."""
    plain = make_run(config, sides=(7,))
    tokens = 7 + plain.shape[1]
    mask = 2 * torch.randn(1, tokens, tokens, generator=torch.Generator().manual_seed(3))
    masked = replace(plain, conds=(replace(plain.conds[0], tensors={**plain.conds[0].tensors, "mask": mask}),))
    for name in STAGES:
        plan = ParallelPlan.parse(f"{name},warmup_steps={warmup_steps}")
        expected = [one_process(deep, run, plan) for run in (plain, masked)]
        assert relative_error(*expected) > DIFFERENT
        for run, result in zip((plain, masked), expected, strict=True):
            assert relative_error(ranks.sample(deep, plan, run).out, result) <= TOLERANCE, name


def one_process(deep: ModelSpec, run: InWorkerRun, plan: ParallelPlan) -> torch.Tensor:
    """The run by the reference model, as stale as the plan is; the last two of the four calls are one step."""
    warm_calls = len(run.recurrence.states) if plan.warmup_steps == STEPS else plan.warmup_steps
    return host_loop(StaleModel(deep.path, patches=plan.num_patches, warm_calls=warm_calls), run)[0]


def test_a_loop_inside_the_workers_equals_the_hosts(
    ranks: Pool, deep: ModelSpec, config: FluxConfig, reference: ReferenceModel
) -> None:
    run = make_run(config, sides=(7, 12), mask=True, references=5)
    expected, previews = host_loop(reference, run)
    for name in ("ulysses=2", "cfg=2", "cfg=2,ring=2"):
        seen: list[torch.Tensor] = []
        result = ranks.sample(deep, ParallelPlan.parse(name), run, on_step=lambda _, x, s=seen: s.append(x.clone()))
        assert max(map(relative_error, (result.out, *seen), (expected, *previews))) <= TOLERANCE, name
        assert len(seen) == STEPS
