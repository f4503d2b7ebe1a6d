"""The formulas of the cost model against numbers worked out by hand, and what must hold for all numbers."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.planner_errors import kept_constants
from benchmarks.planner_model import SHAPES, Shape
from parallel_runtime.models.hosted.count import OperationCounter
from parallel_runtime.parallel.attention import SequenceParallelAttention
from parallel_runtime.parallel.collectives import Axis
from parallel_runtime.parallel.overlap import OverlapRates, SharedHeads, choose_chunks, chunked_s
from parallel_runtime.plan import TOKEN_AXES, ParallelPlan
from parallel_runtime.planner import cost
from parallel_runtime.planner.choose import useful_plans
from parallel_runtime.planner.cost import _handed_s, _weights_s, relayed_s, step_cost
from parallel_runtime.planner.counted import HOP_OPERATIONS, CountedModel
from parallel_runtime.planner.counting import usual_counted
from parallel_runtime.planner.hardware import HIDDEN, Calibration, Interconnect, Rates, Software
from parallel_runtime.planner.known import known_calibration
from parallel_runtime.planner.memory import memory_of
from parallel_runtime.planner.work import Work

# One single block, 4 wide, 2 heads of 2, MLP 16: 4 * 16 + 2 * 4 * 16 = 192 weights a token meets.
TINY = Shape(name="tiny", blocks=(0, 1), width=4, heads=2, modulation=(0, 0), channels=1)
IDLE = {"passes": 0.0, "block_operations": 0.0, "exchange_operations": 0.0}
FLUX = usual_counted().model
WORK = Work(image_tokens=6, text_tokens=2, steps=4)
NEVER = 1e30  # a rate at which nothing takes time
UNIT = Calibration(
    rates=Rates(
        name="unit",
        matmul_flops=NEVER,
        attention_flops=NEVER,
        memory_bandwidth=NEVER,
        memory_bytes=10**9,
        host_bandwidth=NEVER,
    ),
    link=Interconnect(name="unit", bandwidth=NEVER, latency_s=0.0),
    software=Software(name="unit", merge_passes=0, operation_s=0),
    source="the test",
)


def only(part: str, **values: float) -> Calibration:
    """The unit calibration with some constants of one part that do take time."""
    changed = replace(getattr(UNIT, part), **values)
    return replace(UNIT, **{part: changed})


def seconds(calibration: Calibration, work: Work = WORK, engine: dict | None = None, **degrees: int | str) -> float:
    """Of a step of the tiny model, whose blocks take what the engine says."""
    model = TINY.counted(work, IDLE if engine is None else {**IDLE, **engine})
    return step_cost(model, work, ParallelPlan(**degrees), calibration).step_s


@pytest.mark.parametrize(
    ("degrees", "expected"),
    [
        # 2 * tokens * 192 for the block, and 2 * 2 * tokens of the picture * 1 * 4 for the patches in and out.
        ({}, 2 * 8 * 192 + 2 * 6 * 2 * 4),
        ({"ulysses": 2}, 2 * 4 * 192 + 2 * 3 * 2 * 4),
        ({"ring": 2}, 2 * 4 * 192 + 2 * 3 * 2 * 4),
    ],
)
def test_matrices_cost_two_operations_a_weight_and_token_of_this_rank(degrees, expected) -> None:
    assert seconds(only("rates", matmul_flops=1.0), **degrees) == pytest.approx(expected)


def test_attention_costs_four_operations_a_query_key_and_channel_shared_by_all_ranks() -> None:
    calibration = only("rates", attention_flops=1.0)
    assert seconds(calibration) == pytest.approx(4 * 8 * 8 * 4)
    assert seconds(calibration, ring=2) == pytest.approx(4 * 4 * 8 * 4)
    assert seconds(calibration, replace(WORK, guided=True)) == pytest.approx(2 * 4 * 8 * 8 * 4)
    assert seconds(calibration, replace(WORK, guided=True), cfg=2) == pytest.approx(4 * 8 * 8 * 4)


def test_memory_traffic_is_the_weights_once_and_the_activations_as_often_as_they_pass() -> None:
    calibration = only("rates", memory_bandwidth=1.0)
    assert seconds(calibration) == pytest.approx(192 * 2)
    assert seconds(calibration, engine={"passes": 3.0}) == pytest.approx(192 * 2 + 3 * 8 * 4 * 2)
    merging = replace(calibration, software=replace(UNIT.software, merge_passes=5))
    assert seconds(merging, ring=2) == pytest.approx(192 * 2 + 5 * 1 * 4 * 4 * 4)


def test_exchanges_cost_their_bytes_and_a_latency_a_call() -> None:
    gathered = 6 * 1 * 2 / 2  # the result, half of it, once a step
    # Ulysses: 3 * 4 tokens * 1 head * 2 * 2 bytes there, 4 * 1 * 2 * 2 back. Ring: k and v of 4 tokens, 2 heads.
    assert seconds(only("link", bandwidth=1.0), ulysses=2) == pytest.approx(48 + 16 + gathered)
    assert seconds(only("link", bandwidth=1.0), ring=2) == pytest.approx(2 * 4 * 2 * 2 * 2 + gathered)
    fp8 = replace(WORK, exchange="fp8")  # asked for by name: heads of 2 numbers, a byte each, and one for their scale
    assert seconds(only("link", bandwidth=1.0), fp8, ulysses=2) == pytest.approx((48 + 16) * 3 / 4 + gathered)
    assert seconds(only("link", bandwidth=1.0), fp8, ring=2) == pytest.approx(2 * 4 * 2 * 3 + gathered)
    assert seconds(only("link", latency_s=1.0), ulysses=2) == pytest.approx(2 + 1)
    assert seconds(only("link", latency_s=1.0), ring=4) == pytest.approx(3 + 1)


@pytest.mark.parametrize("unpriced", TOKEN_AXES)
def test_an_axis_whose_exchange_has_no_price_is_no_free_one(unpriced: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What CONTRIBUTING says of a strategy that lacks its row."""
    both = dict.fromkeys(TOKEN_AXES, 2)
    seconds(UNIT, **both)
    monkeypatch.delitem(cost.WAITED_S, unpriced)
    with pytest.raises(KeyError, match=unpriced):
        seconds(UNIT, **both)
    seconds(UNIT, **{**both, unpriced: 1})


def test_half_of_what_a_hop_could_hide_behind_attention_hides_and_on_a_cpu_nothing() -> None:
    """Two ranks: 4 * 8 * 8 * 4 / 2 FLOPs, half of them while the one hop travels, which is of 64 bytes."""
    hop, gathered = 64, 6
    for attention_flops, hidden in ((1.0, hop), (8.0, 512 / 8 / 2), (NEVER, 0)):
        calibration = replace(only("link", bandwidth=1.0), rates=replace(UNIT.rates, attention_flops=attention_flops))
        attention = 512 / attention_flops
        assert seconds(calibration, ring=2) == pytest.approx(attention + hop - HIDDEN * hidden + gathered)
        on_cpu = replace(calibration, rates=replace(calibration.rates, asynchronous=False))
        assert seconds(on_cpu, ring=2) == pytest.approx(attention + hop + gathered)


# 16 heads of 128, of 10,000 tokens in one attention: what is counted of a row of a call.
COUNTED = CountedModel(
    name="counted",
    whole={
        "attended.attention_flops": (0.0, 0.0, 4.0 * 16 * 128),
        "query_bytes": (0.0, 2.0 * 2 * 16 * 128),
        "key_bytes": (0.0, 2.0 * 2 * 16 * 128),
        "exchanges": (3.0,),
    },
    shared={},
    numbers_per_token=1.0,
    key_heads=16,
    weight_bytes=0,
    block_bytes=(),
)


def test_heads_in_chunks_hide_as_ranks_send_them() -> None:
    """The planner's number of chunks is the ranks': of three attentions, each of which has a third of all."""
    work = Work(image_tokens=10_000, text_tokens=0)
    calibration = replace(
        UNIT,
        rates=replace(UNIT.rates, attention_flops=100e12),
        link=Interconnect(name="slow", bandwidth=10e9, latency_s=40e-6),
    )
    flops, sent = 4.0 * 16 * 128 * 10_000**2 / 2 / 3, 2.0 * 2 * 16 * 128 * 10_000 / 4 / 3
    shared = SharedHeads(
        groups=16, ranks=2, keys=10_000, head_dim=43, flops=flops, arriving_bytes=1.5 * sent, returning_bytes=sent / 2
    )
    chunks = choose_chunks(shared, OverlapRates(attention_flops=100e12, bandwidth=10e9, latency_s=40e-6))
    assert chunks > 1
    assert COUNTED.head_dim(work) == 43  # of all heads of three attentions as one: a third of 128
    attend, whole = flops / 100e12, 2 * sent / 10e9
    both = chunked_s(attend_s=attend, arriving_s=0.75 * whole, returning_s=0.25 * whole, latency_s=40e-6, chunks=chunks)
    waiting = whole + 2 * chunks * 40e-6
    expected = 3 * (attend + waiting - HIDDEN * (waiting + attend - both))
    assert step_cost(COUNTED, work, ParallelPlan(ulysses=2), calibration).step_s == pytest.approx(expected)
    at_once = 3 * (attend + whole + 2 * 40e-6)
    assert step_cost(COUNTED, work, ParallelPlan(ulysses=2), calibration).step_s < at_once
    limited = replace(calibration, rates=replace(calibration.rates, most_chunks=1))
    assert step_cost(COUNTED, work, ParallelPlan(ulysses=2), limited).step_s == pytest.approx(at_once)
    on_cpu = replace(calibration, rates=replace(calibration.rates, asynchronous=False))
    assert step_cost(COUNTED, work, ParallelPlan(ulysses=2), on_cpu).step_s == pytest.approx(at_once)


def test_the_longest_batch_group_decides() -> None:
    rate = only("rates", attention_flops=1.0)
    whole = seconds(rate)
    for batch_groups, rows in ((2, 3), (4, 2)):  # of five rows
        assert seconds(rate, replace(WORK, batch=5), data=batch_groups) == pytest.approx(rows * whole)


def test_a_host_that_runs_ahead_hides_behind_the_device_and_one_that_does_not_adds() -> None:
    """The block and what is outside: ten operations. What hides is all but the last one's part, or the first one's."""
    device = only("rates", attention_flops=512.0)  # 2 s of attention
    ten = {"block_operations": 5.0}
    for launch, ahead, beside in ((1.0, 2.0 + 0.1, 3.0), (5.0, 5.0 + 0.2, 7.0)):
        calibration = replace(device, software=replace(UNIT.software, operation_s=launch / 10))
        assert seconds(calibration, engine=ten) == pytest.approx(ahead)
        on_cpu = replace(calibration, rates=replace(calibration.rates, asynchronous=False))
        assert seconds(on_cpu, engine=ten) == pytest.approx(beside)


def test_the_host_starts_an_exchanges_operations_once_and_those_of_each_hop() -> None:
    calibration, more = only("software", operation_s=1.0), {"block_operations": 5.0, "exchange_operations": 3.0}
    for degrees, operations in (({}, 10), ({"ulysses": 2}, 13), ({"ring": 4}, 13 + 3 * HOP_OPERATIONS)):
        assert seconds(calibration, engine=more, **degrees) == pytest.approx(operations)


class SilentRing(Axis):
    def start_shift(self, send: torch.Tensor, shape: tuple[int, ...]) -> Any:
        arriving = send.new_empty(shape)
        return SimpleNamespace(wait=lambda: arriving)


def test_a_hop_has_as_many_operations_as_ranks_start_for_it() -> None:
    def started(ring: int) -> float:
        qkv = list(torch.zeros(3, 1, 4, 16, 32, dtype=torch.bfloat16))
        attention, counter = SequenceParallelAttention(ring=SilentRing("ring", size=ring)), OperationCounter()
        with torch.no_grad(), counter:
            attention.attend(lambda *_: None, qkv, query_lengths=[16] * ring, key_lengths=[16] * ring)
        return counter.counts["module.operations"]

    assert started(4) - started(3) == HOP_OPERATIONS


def test_pipefusion_repeats_the_text_and_starts_with_a_synchronous_step() -> None:
    model = replace(TINY, blocks=(0, 4)).counted(WORK, IDLE)
    cost = step_cost(model, WORK, ParallelPlan(pipefusion=2), only("rates", attention_flops=1.0))
    whole = 4 * (4 * 8 * 8 * 4)
    assert cost.step_s == pytest.approx(whole * (2 + 6 / 2) / 8)
    assert cost.warmup_step_s == pytest.approx(whole)
    assert cost.image_s(4) == pytest.approx(whole + 3 * cost.step_s)


def test_pipefusion_waits_for_the_stage_with_the_most_blocks() -> None:
    work = Work(image_tokens=8, text_tokens=0)
    model = replace(TINY, blocks=(0, 3)).counted(work, IDLE)
    uneven = step_cost(model, work, ParallelPlan(pipefusion=2), only("rates", attention_flops=1.0)).step_s
    assert uneven == pytest.approx(2 * 2 * (4 * 4 * 8 * 4))  # two patches, each through two of the three blocks


def test_blocks_that_stay_whole_come_in_the_first_step_alone() -> None:
    for weights, calibration in (("sharded", only("link", bandwidth=1.0)), ("offloaded", slow_copies())):
        model, plan = TINY.counted(WORK, IDLE), ParallelPlan(ulysses=2, weights=weights)
        none, half, all_of_them = (
            step_cost(model, WORK, plan, calibration, staying=staying) for staying in (0.0, 0.5, 1.0)
        )
        assert (
            none.step_s - half.step_s == pytest.approx(half.step_s - all_of_them.step_s) and half.step_s < none.step_s
        )
        assert none.step_s == none.warmup_step_s == half.warmup_step_s == all_of_them.warmup_step_s
        assert half.image_s(4) == pytest.approx(none.step_s + 3 * half.step_s)


def slow_copies() -> Calibration:
    """Where only copies from host memory take time."""
    return only("rates", host_bandwidth=1.0)


def test_sharded_weights_travel_with_each_call_beside_the_exchanges_and_hide_behind_computing() -> None:
    slow = only("link", bandwidth=1.0)
    gather, exchanged = 192 * 2 / 2, 64 + 6
    assert seconds(slow, ulysses=2) == pytest.approx(exchanged)
    assert seconds(slow, ulysses=2, weights="sharded") == pytest.approx(gather + exchanged), "over one link"
    guided = replace(WORK, guided=True)
    assert seconds(slow, guided, ulysses=2, weights="sharded") == pytest.approx(2 * (gather + exchanged))
    assert seconds(slow, guided, cfg=2, weights="sharded") < 1.3 * gather, "one call a rank"
    hidden = replace(slow, rates=replace(UNIT.rates, attention_flops=1.0))
    assert seconds(hidden, ulysses=2, weights="sharded") == pytest.approx(seconds(hidden, ulysses=2))


def test_weights_are_counted_as_flux_has_them() -> None:
    assert FLUX.weight_bytes / 2 == pytest.approx(11.90e9, rel=0.003)  # as published


TWO_GUIDED = Work(image_tokens=4096, text_tokens=512, guided=True, batch=2)
ANY_PLAN = st.sampled_from(
    [plan for ranks in (1, 2, 3, 4, 6, 8) for plan in useful_plans(ranks, model=FLUX, work=TWO_GUIDED, stale=True)]
)
FACTOR = st.floats(1.0, 1000.0)
SPEEDS = ("matmul_flops", "attention_flops", "memory_bandwidth", "host_bandwidth")
BURDENS = ("merge_passes", "operation_s")
A_LITTLE = 1 + 1e-9  # sums in another order
OUTSIDE = 1 + 1e-4  # a token of the picture takes more than one of the text, outside of the blocks
PUBLISHED = SHAPES["flux1-dev"].counted(TWO_GUIDED, kept_constants()["software"]["eager"])


@st.composite
def works(draw) -> Work:
    return Work(
        image_tokens=draw(st.integers(1, 20_000)),
        text_tokens=draw(st.integers(0, 600)),
        guided=True,
        batch=2,
        steps=draw(st.integers(1, 50)),
    )


@st.composite
def machines(draw) -> Calibration:
    """With all heads sent at once: of how many chunks ranks make, a faster link makes fewer."""
    known = known_calibration(draw(st.sampled_from(["H100", "L40", "RTX 4090", "cpu"])))
    return replace(known, rates=replace(known.rates, most_chunks=1))


@given(work=works(), plan=ANY_PLAN, machine=machines(), factor=FACTOR)
def test_a_faster_device_or_link_is_never_slower_and_more_overhead_never_faster(work, plan, machine, factor) -> None:
    cost = step_cost(PUBLISHED, work, plan, machine)
    parts = (cost.compute_s, cost.communication_s, cost.launch_s)
    assert min(parts) >= 0 < cost.warmup_step_s and sum(parts) == pytest.approx(cost.step_s)
    before = cost.step_s * A_LITTLE
    for name in SPEEDS:
        rates = replace(machine.rates, **{name: getattr(machine.rates, name) * factor})
        assert step_cost(PUBLISHED, work, plan, replace(machine, rates=rates)).step_s <= before
    faster = replace(machine.link, bandwidth=machine.link.bandwidth * factor)
    assert step_cost(PUBLISHED, work, plan, replace(machine, link=faster)).step_s <= before
    nearer = replace(machine.link, latency_s=machine.link.latency_s / factor)
    assert step_cost(PUBLISHED, work, plan, replace(machine, link=nearer)).step_s <= before
    for name in BURDENS:
        software = replace(machine.software, **{name: getattr(machine.software, name) * factor})
        assert step_cost(PUBLISHED, work, plan, replace(machine, software=software)).step_s * A_LITTLE >= cost.step_s


@given(work=works(), plan=ANY_PLAN, machine=machines(), image=st.integers(0, 5000), text=st.integers(0, 500))
def test_more_tokens_are_never_faster_and_never_smaller(work, plan, machine, image, text) -> None:
    more = replace(work, image_tokens=work.image_tokens + image, text_tokens=work.text_tokens + text)
    before, after = (step_cost(PUBLISHED, each, plan, machine).step_s for each in (work, more))
    assert after * OUTSIDE >= before
    small, large = (memory_of(FLUX, each, plan, machine.rates).total for each in (work, more))
    assert large >= small


SMALL = CountedModel(
    name="small",
    whole={"module.matmul_flops": (0.0, 1.0), "query_bytes": (0.0, 8.0), "exchanges": (2.0,)},
    shared={},
    **{"numbers_per_token": 1.0, "key_heads": 4, "weight_bytes": 0, "block_bytes": (), "staged_blocks": 2},
)
HUNDRED = Work(image_tokens=100, text_tokens=0)


def test_a_model_that_keeps_something_computes_it_in_the_first_step_or_in_each() -> None:
    filling = ({"module.matmul_flops": (0.0, 3.0)}, {})
    model = replace(SMALL, filling=filling, kept_bytes={"default": (0.0, 2.0)})
    rates = replace(UNIT.rates, matmul_flops=1.0, host_bandwidth=0.5)
    known = replace(UNIT, rates=rates)
    for kept_on, step_s in (("gpu", 100.0), ("off", 300.0), ("cpu", 2.0 * 100 / 0.5)):  # from host memory, beside it
        cost = step_cost(model, replace(HUNDRED, kept_on=kept_on), ParallelPlan(), known)
        assert (cost.step_s, cost.warmup_step_s) == (pytest.approx(step_s), pytest.approx(300.0))
        assert cost.image_s(4) == pytest.approx(300 + 3 * step_s)
    on_cpu = replace(known, rates=replace(rates, asynchronous=False))
    assert step_cost(model, replace(HUNDRED, kept_on="cpu"), ParallelPlan(), on_cpu).step_s == pytest.approx(100.0)


def test_a_stage_waits_for_what_the_one_before_hands_on() -> None:
    known = replace(only("link", bandwidth=1.0), rates=replace(UNIT.rates, matmul_flops=1.0))
    cost = step_cost(SMALL, HUNDRED, ParallelPlan(pipefusion=2), known)
    # Of two patches of 50 tokens: half of the blocks, and the queries of one attention.
    turn_s, handed_s = 50 / 2, 50 * 8 / 2 / 2
    assert cost.step_s == pytest.approx(2 * turn_s + 2 * (handed_s - turn_s))
    assert cost.warmup_step_s == pytest.approx(100 + 200)  # all tokens through both, handed on once


def test_messages_of_a_step_go_to_further_machines_and_back() -> None:
    further = replace(UNIT, between=Interconnect(name="far", bandwidth=NEVER, latency_s=0.25), machines=(2, 1))
    assert [relayed_s(ParallelPlan(data=ranks), further) for ranks in (1, 2, 3)] == [0.0, 0.0, 1.0]
    cost = step_cost(SMALL, replace(HUNDRED, batch=3), ParallelPlan(data=3), further)
    assert cost.step_s == cost.communication_s == cost.warmup_step_s == pytest.approx(1.0)


NEAR = Interconnect(name="near", bandwidth=2.0, latency_s=3.0)


@pytest.mark.parametrize(
    ("plan", "guided", "seconds"),
    [
        ("pipefusion=2", False, 100 / 2 + 3),  # 400 bytes of queries, and as much of outputs, of two attentions
        ("pipefusion=2", True, 2 * (100 / 2 + 3)),
        ("cfg=2,pipefusion=2", True, 100 / 2 + 3),  # each pipeline is on one of two machines
        ("pipefusion=2,ulysses=2", False, 50 / 2 + 3),
    ],
)
def test_a_patch_is_handed_on_a_row_and_a_call_at_a_time(plan: str, guided: bool, seconds: float) -> None:
    far, machines = Interconnect(name="far", bandwidth=1.0, latency_s=99.0), (2, 2) if "cfg" in plan else (4,)
    known = replace(UNIT, link=NEAR, between=far, machines=machines)
    work = replace(HUNDRED, guided=guided)
    assert _handed_s(SMALL, work, ParallelPlan.parse(plan), known, patches=2) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("plan", "seconds"),
    [
        ("ulysses=2", (0, 0)),
        ("weights=offloaded", (400 / 4, 0)),
        ("ulysses=2,weights=offloaded", (400 / 2 / 4, 200 / 2 + 2 * 3)),
        ("ulysses=2,weights=sharded", (0, 200 / 2 + 2 * 3)),
        ("pipefusion=2,ulysses=2,weights=sharded", (0, 100 / 2 + 1 * 3)),
    ],
)
def test_weights_come_from_the_host_and_from_other_ranks(plan: str, seconds: tuple[float, float]) -> None:
    known = replace(UNIT, link=NEAR, rates=replace(UNIT.rates, host_bandwidth=4.0))
    model = replace(SMALL, block_bytes=(300, 100))
    assert _weights_s(model, ParallelPlan.parse(plan), known) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("speeds", "shares", "plan", "slowed"),
    [
        ((), None, "ulysses=2", 1.0),
        ((1.0, 0.5), None, "ulysses=1", 1.0),
        ((1.0, 0.5), None, "ulysses=2", 2 * (2 / 3)),  # shares of 10 : 5
        ((1.0, 0.5), None, "pipefusion=2", 2 * (2 / 3)),
        ((1.0, 0.5), (), "ulysses=2", 2.0),
        ((1.0, 0.5), (3, 1), "ulysses=2", 2 * (3 / 4)),
        ((1.0, 0.5), None, "cfg=2", 2.0),  # sides are equal
        ((1.0, 0.95), None, "ulysses=2", 1 / 0.95),  # alike, so equal shares
        ((1.0, 0.155), None, "ulysses=2", 2 * (2 / 12) / 0.155),  # tenths of the quickest
        ((0.5, 1.0, 1.0, 0.5), None, "data=2,ulysses=2", 2 * (2 / 3)),
        ((1.0, 1.0, 0.5, 0.5), None, "data=2,ulysses=2", 2.0),
    ],
)
def test_unequal_devices_compute_by_their_shares(
    speeds: tuple[float, ...], shares: tuple[int, ...] | None, plan: str, slowed: float
) -> None:
    calibration = replace(known_calibration("RTX 4090"), speeds=speeds, shares=shares)
    assert calibration.slowed(ParallelPlan.parse(plan)) == pytest.approx(slowed)
    asked = FLUX, Work(image_tokens=4096, text_tokens=512), ParallelPlan.parse(plan)
    equal, unequal = (step_cost(*asked, each) for each in (known_calibration("RTX 4090"), calibration))
    if "pipefusion" not in plan:
        assert unequal.compute_s == pytest.approx(slowed * equal.compute_s)
