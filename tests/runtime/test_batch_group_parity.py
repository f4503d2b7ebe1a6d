"""Calls and rows shared out over batch groups give what one process gives, under every plan; shared out wrongly,
not."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel_runtime.checkpoint import ModelSpec
from parallel_runtime.cli.workload import Workload, relative_error
from parallel_runtime.models.flux.config import FluxConfig
from parallel_runtime.models.flux.reference import ReferenceModel
from parallel_runtime.parallel.shard import SequenceShard
from parallel_runtime.parallel.traffic import AttentionShape, predict_groups
from parallel_runtime.plan import ParallelPlan, heads_error
from parallel_runtime.pool.calls import ModelCall, RunResult, split_rows
from parallel_runtime.pool.pool import Pool
from runtime.shard_sizes import ranges, sent, weight_bytes

# fp32 sums in another order: what the design allows any plan
FP32_TOLERANCE = 1e-5
HEADS = 24
DEGREES = range(1, 9)
EVERY_PLAN = [
    ParallelPlan(data=data, cfg=cfg, ring=ring, ulysses=ulysses)
    for data in DEGREES
    for cfg in DEGREES
    for ring in DEGREES
    for ulysses in DEGREES
    if data * cfg * ring * ulysses <= 8 and heads_error(ulysses, HEADS) is None
]
LANE_PLANS = [plan for plan in EVERY_PLAN if plan.batch_groups > 1]


def workload(text_tokens: int, batch: int, *, width: int = 64, height: int = 48, seed: int = 0) -> Workload:
    return Workload(width=width, height=height, text_tokens=text_tokens, batch=batch, seed=seed)


# cond and uncond of unequal text lengths; one call of several rows; more calls than batch groups, of unequal rows and
# images
REQUESTS = {
    "cond and uncond": [workload(13, 1), workload(5, 1, seed=1)],
    "a batch of each": [workload(13, 3), workload(5, 3, seed=1)],
    "four rows": [workload(7, 4)],
    "five calls": [workload(1 + 3 * n, 1 + n % 3, width=16 * (1 + n), seed=n) for n in range(5)],
}


def as_calls(config: FluxConfig, inputs: Sequence[dict[str, torch.Tensor]], **options: object) -> list[ModelCall]:
    return [
        ModelCall(
            tensors=tensors,
            out_shape=(*tensors["img"].shape[:2], config.out_channels),
            out_dtype=torch.float32,
            options=options,
        )
        for tensors in inputs
    ]


def errors(result: RunResult, expected: Sequence[torch.Tensor]) -> list[float]:
    """Of every row of every call: a wrong row must not hide among right ones."""
    return [
        relative_error(row, judged)
        for out, reference in zip(result.outs, expected, strict=True)
        for row, judged in zip(out, reference, strict=True)
    ]


def test_the_plans_are_all_there_are() -> None:
    assert {plan.ranks for plan in EVERY_PLAN} == set(DEGREES)
    assert len(EVERY_PLAN) == len(set(EVERY_PLAN)) > 50


# Every plan runs one request; all requests under all plans are left to the full tier.
CASES = [
    *(pytest.param(name, EVERY_PLAN[index :: len(REQUESTS)], id=name) for index, name in enumerate(REQUESTS)),
    *(pytest.param(name, EVERY_PLAN, id=f"{name}, every plan", marks=pytest.mark.full) for name in REQUESTS),
]


@pytest.mark.parametrize(("name", "plans"), CASES)
def test_every_plan_equals_one_process(
    eight_ranks: Pool,
    sample: ModelSpec,
    reference_model: ReferenceModel,
    config: FluxConfig,
    name: str,
    plans: list[ParallelPlan],
) -> None:
    """And sends what the formula says."""
    request = REQUESTS[name]
    inputs = [each.tensors(config) for each in request]
    expected, calls = [reference_model(tensors) for tensors in inputs], as_calls(config, inputs)
    shape = AttentionShape(
        blocks=config.depth + config.depth_single,
        heads=config.num_heads,
        head_dim=config.head_dim,
        element_bytes=4,
        batch=0,
    )
    bad = {}
    for plan in plans:
        result = eight_ranks.run(sample, plan, calls)
        worst = max(errors(result, expected))
        if not worst <= FP32_TOLERANCE:
            bad[plan.name] = worst
        check_reports(plan, result, rows=[each.batch for each in request])
        lengths = [SequenceShard(each.text_tokens, each.image_tokens, plan.parts, 0).lengths for each in request]
        batch_groups = split_rows(calls, plan)
        predicted = predict_groups(shape, batch_groups, lengths=lengths, ring=plan.ring, ulysses=plan.ulysses)
        assert [(rank.collectives, rank.sent_bytes) for rank in result.ran] == predicted, plan.name
    assert not bad


def check_reports(plan: ParallelPlan, result: RunResult, *, rows: list[int]) -> None:
    """Each rank says its batch group; the batch groups' pieces are every row once; ranks beyond the plan are no
    members."""
    assert len(result.ranks) == 8
    assert [reply.ran is None for reply in result.ranks] == [rank >= plan.ranks for rank in range(8)]
    for rank, ran in enumerate(result.ran):
        assert ran.batch_group == rank // plan.parts
        assert ran.pieces == result.ran[ran.batch_group * plan.parts].pieces
    run = [piece for ran in result.ran[:: plan.parts] for piece in ran.pieces]
    assert [(call, row) for call, start, stop in run for row in range(start, stop)] == [
        (call, row) for call, count in enumerate(rows) for row in range(count)
    ]


def test_batch_groups_that_run_the_first_row_for_theirs_are_wrong(
    eight_ranks: Pool, sample: ModelSpec, reference_model: ReferenceModel, config: FluxConfig
) -> None:
    inputs = [each.tensors(config) for each in REQUESTS["a batch of each"]]
    expected = [reference_model(tensors) for tensors in inputs]
    for plan in LANE_PLANS[::3]:
        result = eight_ranks.run(sample, plan, as_calls(config, inputs, first_row=True))
        assert max(errors(result, expected)) > 0.05, plan.name


@pytest.mark.slow
@settings(max_examples=5)
@given(
    plan=st.sampled_from(LANE_PLANS),
    shapes=st.lists(
        st.tuples(st.integers(1, 90), st.integers(1, 4), st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=4
    ),
    seed=st.integers(0, 1000),
)
def test_random_shapes_equal_one_process(
    eight_ranks: Pool,
    sample: ModelSpec,
    reference_model: ReferenceModel,
    config: FluxConfig,
    plan: ParallelPlan,
    shapes: list[tuple[int, int, int, int]],
    seed: int,
) -> None:
    inputs = [
        workload(text, batch, width=16 * columns, height=16 * rows, seed=seed + number).tensors(config)
        for number, (text, batch, columns, rows) in enumerate(shapes)
    ]
    result = eight_ranks.run(sample, plan, as_calls(config, inputs))
    assert max(errors(result, [reference_model(tensors) for tensors in inputs])) <= FP32_TOLERANCE


@pytest.mark.slow
def test_each_row_has_its_own_mask_residuals_and_timestep_in_every_batch_group(
    eight_ranks: Pool, sample: ModelSpec, reference_model: ReferenceModel, config: FluxConfig
) -> None:
    """A mask of a row each and one for all rows; residuals of a row each."""
    chance = torch.Generator().manual_seed(3)
    one, two = workload(5, 3), workload(9, 2, seed=1)
    inputs = [one.tensors(config), two.tensors(config)]
    length = 5 + one.image_tokens
    inputs[0]["mask"] = torch.randn(3, length, length, generator=chance)
    length = 9 + two.image_tokens
    inputs[1]["mask"] = torch.rand(1, length, length, generator=chance) > 0.3
    inputs[1]["mask"][:, :, -1] = True
    residuals = []
    for tensors in inputs:
        shape = (*tensors["img"].shape[:2], config.hidden_size)
        residuals.append({f"control_{kind}.0": torch.randn(shape, generator=chance) for kind in ("in", "out")})
    expected = [
        reference_model.with_residuals(tensors, [added["control_in.0"]], [added["control_out.0"]])
        for tensors, added in zip(inputs, residuals, strict=True)
    ]
    merged = [tensors | added for tensors, added in zip(inputs, residuals, strict=True)]
    calls = as_calls(config, merged, control_in=[0], control_out=[0])
    for text in ("data=5", "cfg=2", "data=2,cfg=2,ulysses=2", "data=2,ring=3", "cfg=3,ulysses=2"):
        result = eight_ranks.run(sample, ParallelPlan.parse(text), calls)
        assert max(errors(result, expected)) <= FP32_TOLERANCE, text


SHARDED = ("cfg=2", "ulysses=3", "data=2,cfg=2", "data=2,cfg=2,ring=2", "cfg=3,ulysses=2", "data=2,cfg=3")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weights", "plans", "names"),
    [
        pytest.param("sharded", SHARDED[1::4], ("cond and uncond", "five calls"), id="sharded"),
        pytest.param("offloaded", SHARDED[::4], ("a batch of each",), id="offloaded"),
        *(
            pytest.param(weights, SHARDED, tuple(REQUESTS), id=f"{weights}, every plan", marks=pytest.mark.full)
            for weights in ("sharded", "offloaded")
        ),
    ],
)
def test_sharded_plans_equal_one_process_and_share_the_weights_out(
    eight_ranks: Pool,
    sample: ModelSpec,
    reference_model: ReferenceModel,
    config: FluxConfig,
    weights: str,
    plans: tuple[str, ...],
    names: tuple[str, ...],
) -> None:
    """Batch groups with more passes than others, batch groups without work, ranks that sleep."""
    requests = {name: [each.tensors(config) for each in REQUESTS[name]] for name in names}
    expected = {name: [reference_model(tensors) for tensors in inputs] for name, inputs in requests.items()}
    for text in plans:
        plan = ParallelPlan.parse(f"{text},weights={weights}")
        units = ranges(weight_bytes(sample.path), plan.replica_ranks)
        held = [sum(units.values())] * plan.ranks + [0] * (8 - plan.ranks)
        assert eight_ranks.load(sample, plan).parameter_bytes == held, text
        for name, inputs in requests.items():
            result = eight_ranks.run(sample, plan, as_calls(config, inputs))
            assert max(errors(result, expected[name])) <= FP32_TOLERANCE, (text, name)
            for first in range(0, plan.ranks, plan.replica_ranks):
                replica = result.ran[first : first + plan.replica_ranks]
                gathered = sent(units, plan.replica_ranks, passes=max(len(ran.pieces) for ran in replica))
                assert {(ran.weight_collectives, ran.weight_bytes) for ran in replica} == {gathered}, (text, name)
        eight_ranks.unload(sample, plan)


@pytest.mark.slow
def test_one_rank_may_keep_its_weights_in_host_memory(
    eight_ranks: Pool, sample: ModelSpec, reference_model: ReferenceModel, config: FluxConfig
) -> None:
    inputs = [each.tensors(config) for each in REQUESTS["cond and uncond"]]
    for text in ("weights=offloaded", "data=2,weights=offloaded"):
        result = eight_ranks.run(sample, ParallelPlan.parse(text), as_calls(config, inputs))
        assert max(errors(result, [reference_model(tensors) for tensors in inputs])) <= FP32_TOLERANCE, text


@pytest.mark.slow
def test_image_k_is_the_same_image_whatever_the_degree(
    eight_ranks: Pool, sample: ModelSpec, config: FluxConfig
) -> None:
    """Bit for bit: a call of one row is the same work in any batch group."""
    inputs = [workload(11, 1, seed=seed).tensors(config) for seed in range(5)]
    calls = as_calls(config, inputs)
    alone = [eight_ranks.run(sample, ParallelPlan(), [call]).outs[0] for call in calls]
    for degree in (1, 2, 3, 5, 8):
        outs = eight_ranks.run(sample, ParallelPlan(data=degree), calls).outs
        assert all(torch.equal(out, before) for out, before in zip(outs, alone, strict=True)), degree
