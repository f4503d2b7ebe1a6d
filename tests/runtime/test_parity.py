"""Every plan equals ComfyUI's bare module in one process, at any size, in any dtype; without its exchange, none does.

Owns: which ranks compute which rows, all degrees up to eight ranks, where weights lie. Which classes there are is
tests/models's; a pipeline whose keys are a step old is models/test_pipelined_pool.py's.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from rounding import ROUNDING

from host.tiny_hosted import BLOCKS, HEAD_DIM, HEADS, WIDTH, OneProcess, call, spec_of
from parallel_runtime.checkpoint import ModelSpec, read_header
from parallel_runtime.model_call import ModelCall
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.calls import RunResult
from parallel_runtime.pool.pool import Pool
from parallel_runtime.proof import relative_error

ALLOWANCE = 2  # times what one process loses in a half on this machine: rounding at other places
WRONG = 0.05
DEGREES = range(1, 9)
EVERY_PLAN = [
    ParallelPlan(data=data, cfg=cfg, ring=ring, ulysses=ulysses)
    for data in DEGREES
    for cfg in DEGREES
    for ring in DEGREES
    for ulysses in DEGREES
    if data * cfg * ring * ulysses <= 8
]
STAGES = [
    ParallelPlan.parse(name)
    for name in ("pipefusion=4,ulysses=2", "pipefusion=3,cfg=2", "pipefusion=2,ring=2,data=2", "pipefusion=2,ulysses=3")
]
# Batch groups with more pieces than others, batch groups without work, ranks that sleep; and one rank.
ELSEWHERE = ("ulysses=3", "cfg=2", "data=2,cfg=2,ring=2", "data=2,cfg=3", "data=2,ulysses=2", "cfg=3,ulysses=2")
SHARDED = [ParallelPlan.parse(f"{name},weights=sharded") for name in ELSEWHERE]
OFFLOADED = [ParallelPlan.parse(f"{name}weights=offloaded") for name in ("", "data=2,", "ulysses=3,", "cfg=2,ring=2,")]
# Devices of unequal speed: each axis alone, two of them, rows of batch groups, and weights that are shared out equally.
UNEQUAL = [
    ParallelPlan.parse(name)
    for name in (
        *("ulysses=2,shares=2:1", "ring=3,shares=5:1:2", "ring=2,ulysses=2,shares=1:2:3:4", "data=3,shares=1:1:4"),
        *("data=2,ulysses=2,shares=4:2:1:1", "cfg=2,ring=2,shares=3:1:2:1", "ulysses=3,shares=3:2:1,weights=sharded"),
    )
]
PLANS = [*EVERY_PLAN, *STAGES, *SHARDED, *OFFLOADED, *UNEQUAL]
# Of every plan: each axis alone, each two of them unevenly, each three; what else there is differs in numbers alone.
USUAL_DEGREES = ([], [2], [3], [8], [2, 3], [2, 2, 2])
USUAL = [plan for plan in EVERY_PLAN if sorted(each for each in plan.degrees if each > 1) in USUAL_DEGREES]
FEWER_PLANS = [*USUAL, *STAGES, *SHARDED, *OFFLOADED, *UNEQUAL]
# By name, calls of one size: cond and uncond of unequal text; several rows; more calls than batch groups, of unequal
# rows and sizes; fewer tokens than ranks
REQUESTS = {
    "cond and uncond": [{"texts": (13, 5)}],
    "a batch of each": [{"texts": (13, 5), "batch": 3, "width": 88, "height": 40}],
    "four rows": [{"texts": (7,), "batch": 4, "frames": 1}],
    "five calls": [{"texts": (1 + 3 * n,), "batch": 1 + n % 3, "width": 16 * (1 + n), "seed": n} for n in range(5)],
    "two tokens": [{"texts": (1, 3), "batch": 2, "width": 32, "height": 16, "frames": 1}],
}
Asked = tuple[list[ModelCall], list[torch.Tensor]]


def asked(process: OneProcess, sizes: Sequence[dict]) -> Asked:
    """The calls of all sizes, and their results in one process."""
    calls, expected = [], []
    for size in sizes:
        made, outs = process.calls(**size)
        calls += made
        expected += outs
    return calls, expected


@pytest.fixture(scope="module")
def requests(one_process: OneProcess) -> dict[str, Asked]:
    """By name."""
    return {name: asked(one_process, sizes) for name, sizes in REQUESTS.items()}


def worst(result: RunResult, expected: Sequence[torch.Tensor]) -> float:
    """Of every row of every call: a wrong row must not hide among right ones."""
    pairs = zip(result.outs, expected, strict=True)
    return max(relative_error(row, right) for out, whole in pairs for row, right in zip(out, whole, strict=True))


def told(calls: Sequence[ModelCall], **options: object) -> list[ModelCall]:
    """The same calls with more options."""
    return [replace(each, options={**each.options, **options}) for each in calls]


def fits(name: str, plan: ParallelPlan) -> bool:
    """Whether a plan computes a request: fewer tokens than patches are refused."""
    return plan.num_patches == 1 or name != "two tokens"


def dealt(plans: Sequence[ParallelPlan]) -> dict[str, list[ParallelPlan]]:
    """One request for each of these plans, in turn: by the request's name, its plans."""
    turn, plans_of = itertools.cycle(REQUESTS), {name: [] for name in REQUESTS}
    for plan in plans:
        plans_of[next(name for name in turn if fits(name, plan))].append(plan)
    return plans_of


# All requests under all plans are left to the full tier.
ALL = {name: [plan for plan in PLANS if fits(name, plan)] for name in REQUESTS}
CASES = [
    *(pytest.param(name, plans, id=name) for name, plans in dealt(FEWER_PLANS).items()),
    *(pytest.param(name, plans, id=f"{name}, every plan", marks=pytest.mark.full) for name, plans in ALL.items()),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "plans"), CASES)
def test_every_plan_equals_one_process(
    eight_ranks: Pool, tiny_hosted: ModelSpec, requests: dict[str, Asked], name: str, plans: list[ParallelPlan]
) -> None:
    (calls, expected), errors = requests[name], {}
    for plan in plans:
        result = eight_ranks.run(tiny_hosted, plan, calls)
        errors[plan.name] = worst(result, expected)
        check_reports(plan, result, rows=[len(out) for out in expected])
    assert not {plan: error for plan, error in errors.items() if not error <= ROUNDING}, errors


def check_reports(plan: ParallelPlan, result: RunResult, *, rows: list[int]) -> None:
    """Each rank says its batch group; their pieces are every row once; ranks beyond the plan are no members."""
    ranks_a_group = plan.ranks // plan.batch_groups
    assert [reply.ran is None for reply in result.ranks] == [rank >= plan.ranks for rank in range(8)]
    for rank, ran in enumerate(result.ran):
        assert ran.batch_group == rank // ranks_a_group
        assert ran.pieces == result.ran[ran.batch_group * ranks_a_group].pieces
    run = [piece for ran in result.ran[::ranks_a_group] for piece in ran.pieces]
    assert [(number, row) for number, start, stop in run for row in range(start, stop)] == [
        (number, row) for number, count in enumerate(rows) for row in range(count)
    ]


def test_without_the_exchange_every_plan_is_wrong(
    eight_ranks: Pool, tiny_hosted: ModelSpec, requests: dict[str, Asked]
) -> None:
    calls, expected = requests["cond and uncond"]
    for plan in [*map(ParallelPlan.parse, ("ulysses=2", "ring=3", "ring=2,ulysses=3")), STAGES[0]]:
        result = eight_ranks.run(tiny_hosted, plan, told(calls, local_attention=True))
        assert worst(result, expected) > WRONG, plan.name


def test_a_rank_computes_its_share_of_tokens_heads_and_rows(
    eight_ranks: Pool, tiny_hosted: ModelSpec, requests: dict[str, Asked]
) -> None:
    """Of 48 tokens 36 and 12, of which a ring sends keys and values; of three rows of each call two and one."""
    block, end = WIDTH * 4, 64 * 4
    result = eight_ranks.run(tiny_hosted, ParallelPlan.parse("ring=2,shares=3:1"), [call()])
    assert [rank.sent_bytes for rank in result.ran] == [tokens * 2 * BLOCKS * block + 36 * end for tokens in (36, 12)]
    calls, _ = requests["a batch of each"]
    rows = [ran.pieces for ran in eight_ranks.run(tiny_hosted, ParallelPlan.parse("data=2,shares=2:1"), calls).ran]
    assert [sum(stop - start for _, start, stop in pieces) for pieces in rows] == [4, 2]


def test_a_plan_sends_what_numbers_by_hand_say(eight_ranks: Pool, tiny_hosted: ModelSpec) -> None:
    """24 of 48 tokens, of fp32: queries, keys, values there and an output back, of half the heads; or keys and values.

    And 64 numbers of each token at the end, to the other rank.
    """
    block, end = 24 * WIDTH * 4, 24 * 64 * 4
    for name, blocks in (("ulysses=2", BLOCKS * 4 * block // 2), ("ring=2", BLOCKS * 2 * block)):
        result = eight_ranks.run(tiny_hosted, ParallelPlan.parse(name), [call()])
        assert [rank.sent_bytes for rank in result.ran] == [blocks + end] * 2, name


# Heads that travelled as fp8, of a row of the tiny Wan: 3.8e-2 was measured by heads, 2.0e-2 by keys alone. Whatever
# the ranks: each token of each head is rounded by itself, and what is rounded twice is as if it were once.
ROUNDED = {"ulysses=2": 0.045, "ring=3": 0.025}
ROUNDED |= dict.fromkeys(("ring=2,ulysses=3,shares=3:1:2:1:1:1", "pipefusion=2,ulysses=2"), ROUNDED["ulysses=2"])


def test_heads_that_travel_as_fp8_round_within_what_was_measured_and_send_a_quarter(
    eight_ranks: Pool, tiny_hosted: ModelSpec, requests: dict[str, Asked]
) -> None:
    """Of fp32: a byte for each number and one for the scale of each token and head, of what attention exchanges."""
    calls, expected = requests["cond and uncond"]
    for name, bound in ROUNDED.items():
        plan = ParallelPlan.parse(name)
        exact, rounded = (eight_ranks.run(tiny_hosted, plan, told(calls, exchange=each)) for each in ("exact", "fp8"))
        assert ROUNDING < worst(rounded, expected) <= bound, (name, worst(rounded, expected))
        assert [ran.exchange for ran in exact.ran + rounded.ran] == [""] * plan.ranks + ["fp8"] * plan.ranks
        again = eight_ranks.run(tiny_hosted, plan, calls)
        assert all(map(torch.equal, again.outs, exact.outs)), f"{name}: a call after it is not exact"
    sent, end = 24 * HEADS * (HEAD_DIM + 1), 24 * 64 * 4
    for name, blocks in (("ulysses=2", BLOCKS * 4 * sent // 2), ("ring=2", BLOCKS * 2 * sent)):
        result = eight_ranks.run(tiny_hosted, ParallelPlan.parse(name), told([call()], exchange="fp8"))
        assert [rank.sent_bytes for rank in result.ran] == [blocks + end] * 2, name


@pytest.mark.slow
def test_batch_groups_that_run_the_first_row_for_theirs_are_wrong(
    eight_ranks: Pool, tiny_hosted: ModelSpec, requests: dict[str, Asked]
) -> None:
    calls, expected = requests["a batch of each"]
    for plan in map(ParallelPlan.parse, ("cfg=2", "data=3", "data=2,cfg=2,ring=2")):
        result = eight_ranks.run(tiny_hosted, plan, [calls[0].of_first_row()] * len(calls))
        assert worst(result, expected) > WRONG, plan.name


@pytest.mark.slow
def test_image_k_is_the_same_image_whatever_the_degree(eight_ranks: Pool, tiny_hosted: ModelSpec) -> None:
    """Bit for bit: a call of one row is the same work in any batch group."""
    calls = [call(text=11, seed=seed) for seed in range(5)]
    alone = [eight_ranks.run(tiny_hosted, ParallelPlan(), [each]).outs[0] for each in calls]
    for degree in (1, 2, 3, 5, 8):
        outs = eight_ranks.run(tiny_hosted, ParallelPlan(data=degree), calls).outs
        assert all(torch.equal(out, before) for out, before in zip(outs, alone, strict=True)), degree


def stage(plan: ParallelPlan, rank: int) -> int:
    return plan.layout.stage_of(rank)


# Loaded anew, as weights stay as they were loaded: bytes by shares, of two ranks, three and four, one of which has next
# to nothing; and stages by the shares of all their ranks.
HELD = [
    ParallelPlan.parse(name)
    for name in (
        *("ulysses=2,shares=5:1,weights=sharded", "ring=3,shares=1:998:1,weights=sharded"),
        *("cfg=2,ulysses=2,shares=4:3:2:1,weights=sharded", "ulysses=4,shares=4:3:2:1,weights=offloaded"),
        *(
            "pipefusion=2,shares=3:1",
            "pipefusion=3,shares=2:1:1",
            "pipefusion=2,ulysses=2,shares=3:3:1:1,weights=sharded",
        ),
    )
]


@pytest.mark.slow
@pytest.mark.parametrize("plan", [*SHARDED[::2], *HELD], ids=lambda plan: plan.name)
def test_ranks_that_share_the_weights_out_hold_their_part_of_each_block_and_are_exact(
    eight_ranks: Pool, tiny_hosted: ModelSpec, requests: dict[str, Asked], plan: ParallelPlan
) -> None:
    header = read_header(tiny_hosted.path).tensors
    in_blocks = sum(entry.num_bytes for name, entry in header.items() if name.startswith("blocks."))
    outside = sum(entry.num_bytes for entry in header.values()) - in_blocks
    eight_ranks.unload(tiny_hosted)
    held = eight_ranks.load(tiny_hosted, plan).parameter_bytes
    assert held[plan.ranks :] == [0] * (8 - plan.ranks)
    (calls, expected), shares = requests["cond and uncond"], plan.shares or (1,) * plan.ranks
    for rank, each in enumerate(held[: plan.ranks]):
        of_stage = [shares[other] for other in range(plan.replica_ranks) if stage(plan, other) == stage(plan, rank)]
        of_it = sum(of_stage) / sum(shares[: plan.replica_ranks])  # of four blocks: three and one, or two, one and one
        of_it *= 1 if plan.weights == "replicated" else shares[rank] / sum(of_stage)
        assert -0.01 * in_blocks <= each - outside - of_it * in_blocks < 0.01 * in_blocks, rank
    assert worst(eight_ranks.run(tiny_hosted, plan, calls), expected) <= ROUNDING
    eight_ranks.unload(tiny_hosted)


@pytest.fixture(scope="module", params=["bfloat16", pytest.param("float16", marks=pytest.mark.full)])
def half(request: pytest.FixtureRequest, tiny_hosted: ModelSpec) -> Iterator[tuple[ModelSpec, Asked, list]]:
    """The model in a half: its calls with what one process makes of them in it, and in fp32."""
    spec = spec_of(tiny_hosted.path, request.param)
    with OneProcess(spec) as process:
        given = process.calls((13, 5), batch=2)
        exact, again = process.outputs("float32"), process.calls((13, 5), batch=2)[1]
        apart = [max(map(relative_error, outs, given[1])) for outs in (again, exact)]
        assert apart[0] < apart[1] / 2, "the process has its own dtype again"
        yield spec, given, exact


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ulysses=5", "ring=3", "ulysses=2,ring=4", "cfg=2", "data=2,pipefusion=2"])
def test_every_plan_of_a_half_is_as_near_to_fp32_as_one_process(
    eight_ranks: Pool, half: tuple[ModelSpec, Asked, list], name: str
) -> None:
    spec, (calls, rounded), exact = half
    one = max(map(relative_error, rounded, exact))
    assert 10 * ROUNDING < one, "nothing was rounded"
    plan = ParallelPlan.parse(name)
    assert 10 * ROUNDING < worst(eight_ranks.run(spec, plan, calls), exact) <= ALLOWANCE * one
    first_row = [calls[0].of_first_row()] * len(calls)
    control = told(calls, local_attention=True) if plan.parts > 1 else first_row
    assert worst(eight_ranks.run(spec, plan, control), exact) > ALLOWANCE * one
