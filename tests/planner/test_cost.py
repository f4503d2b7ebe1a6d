"""The cost model: each term counts what it says, and no prediction moves the wrong way."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel_runtime.parallel.overlap import OverlapRates, SharedHeads, choose_chunks, chunked_s
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.planner.choose import useful_plans
from parallel_runtime.planner.counted import CountedModel, counted_cost, counted_memory
from parallel_runtime.planner.counting import usual_counted
from parallel_runtime.planner.hardware import HIDDEN, Calibration, Interconnect, Rates, Software
from parallel_runtime.planner.known import known_calibration
from parallel_runtime.planner.memory import BLOCKS_AT_HAND, CUDA_CONTEXT_BYTES
from parallel_runtime.planner.work import Work

FLUX = usual_counted().model
# One block, 4 wide, 2 heads of 2, whose tokens each meet 192 weights; all numbers are of 2 bytes.
TINY = CountedModel(
    name="tiny",
    whole={
        "module.operations": (1.0,),
        "attended.attention_flops": (0.0, 0.0, 16.0, 0.0, 32.0, 16.0),  # 4 operations a query, key and channel
        "query_bytes": (0.0, 16.0, 0.0, 16.0),  # queries and outputs
        "key_bytes": (0.0, 16.0, 0.0, 16.0),
        "gathered_bytes": (0.0, 2.0),
        "exchanges": (1.0,),
        "gathers": (1.0,),
    },
    shared={"module.matmul_flops": (0.0, 384.0, 0.0, 384.0)},
    numbers_per_token=1.0,
    key_heads=2,
    weight_bytes=384,
    block_bytes=(384,),
    staged_blocks=1,
)
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
    software=Software(name="unit", passes=0, merge_passes=0, block_s=0, exchange_s=0, hop_s=0, operation_s=0.0),
    source="the test",
)


def only(part: str, **values: float) -> Calibration:
    """The unit calibration with some constants of one part that do take time."""
    changed = replace(getattr(UNIT, part), **values)
    return replace(UNIT, **{part: changed})


def seconds(calibration: Calibration, work: Work = WORK, model: CountedModel = TINY, **degrees: int | str) -> float:
    return counted_cost(model, work, ParallelPlan(**degrees), calibration).step_s


def test_matrices_cost_the_operations_of_this_ranks_tokens() -> None:
    rate = only("rates", matmul_flops=1.0)
    assert seconds(rate) == pytest.approx(8 * 384)
    assert seconds(rate, ulysses=2) == seconds(rate, ring=2) == pytest.approx(4 * 384)


def test_attention_is_shared_by_all_ranks_and_rows_by_the_batch_groups() -> None:
    rate, guided = only("rates", attention_flops=1.0), replace(WORK, guided=True)
    assert seconds(rate) == pytest.approx(4 * 8 * 8 * 4)
    assert seconds(rate, ring=2) == seconds(rate, ulysses=2) == pytest.approx(4 * 4 * 8 * 4)
    assert seconds(rate, guided) == pytest.approx(2 * 4 * 8 * 8 * 4)
    assert seconds(rate, guided, cfg=2) == pytest.approx(4 * 8 * 8 * 4)


def test_memory_traffic_is_the_weights_once_a_call_and_what_a_ring_merges() -> None:
    calibration = only("rates", memory_bandwidth=1.0)
    assert seconds(calibration) == pytest.approx(384)
    assert seconds(calibration, replace(WORK, guided=True)) == pytest.approx(2 * 384)
    merging = replace(calibration, software=replace(UNIT.software, merge_passes=5))
    assert seconds(merging, ring=2) == pytest.approx(384 + 5 * 1 * 4 * 4 * 4)


def test_exchanges_cost_their_bytes_and_a_latency_a_call() -> None:
    gathered = 6 * 2 / 2  # the result, half of it, once a step
    # Ulysses: 3 * 4 tokens * 1 head * 2 * 2 bytes there, 4 * 1 * 2 * 2 back. Ring: k and v of 4 tokens, 2 heads.
    assert seconds(only("link", bandwidth=1.0), ulysses=2) == pytest.approx(48 + 16 + gathered)
    assert seconds(only("link", bandwidth=1.0), ring=2) == pytest.approx(2 * 4 * 2 * 2 * 2 + gathered)
    assert seconds(only("link", latency_s=1.0), ulysses=2) == pytest.approx(2 + 1)
    assert seconds(only("link", latency_s=1.0), ring=4) == pytest.approx(3 + 1)


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
    assert counted_cost(COUNTED, work, ParallelPlan(ulysses=2), calibration).step_s == pytest.approx(expected)
    at_once = 3 * (attend + whole + 2 * 40e-6)
    assert counted_cost(COUNTED, work, ParallelPlan(ulysses=2), calibration).step_s < at_once
    limited = replace(calibration, rates=replace(calibration.rates, most_chunks=1))
    assert counted_cost(COUNTED, work, ParallelPlan(ulysses=2), limited).step_s == pytest.approx(at_once)
    limited = replace(calibration, rates=replace(calibration.rates, most_chunks=1))
    in_one = whole + 2 * 40e-6
    assert counted_cost(COUNTED, work, ParallelPlan(ulysses=2), limited).step_s == pytest.approx(3 * (attend + in_one))
    on_cpu = replace(calibration, rates=replace(calibration.rates, asynchronous=False))
    assert counted_cost(COUNTED, work, ParallelPlan(ulysses=2), on_cpu).step_s == pytest.approx(at_once)


def test_a_shared_bridge_slows_an_all_to_all_of_many_ranks_and_no_ring() -> None:
    free, shared = only("link", bandwidth=1.0), only("link", bandwidth=1.0, contention=1.0)
    model, work = replace(TINY, key_heads=4), Work(image_tokens=8, text_tokens=0)
    for degrees, slower in (({"ulysses": 2}, 1.0), ({"ulysses": 4}, 2.0), ({"ring": 4}, 1.0)):
        alone, together = (seconds(calibration, work, model, **degrees) for calibration in (free, shared))
        gathered = 8 * 2 * (max(degrees.values()) - 1) / max(degrees.values())
        assert together - gathered == pytest.approx(slower * (alone - gathered))


def test_the_longest_batch_group_decides() -> None:
    rate = only("rates", attention_flops=1.0)
    whole, (three, four) = (
        seconds(rate),
        (seconds(rate, replace(WORK, batch=5), data=batch_groups) for batch_groups in (2, 4)),
    )
    assert (three, four) == (pytest.approx(3 * whole), pytest.approx(2 * whole)), (
        "five rows over two and four batch groups"
    )


def test_a_host_that_runs_ahead_hides_behind_the_device_and_one_that_does_not_adds() -> None:
    device = only("rates", attention_flops=512.0)  # 2 s of attention
    for launch, ahead, beside in ((1.0, 2.0, 3.0), (5.0, 5.0, 7.0)):
        calibration = replace(device, software=replace(UNIT.software, operation_s=launch))
        assert seconds(calibration) == pytest.approx(ahead)
        on_cpu = replace(calibration, rates=replace(calibration.rates, asynchronous=False))
        assert seconds(on_cpu) == pytest.approx(beside)


def test_pipefusion_repeats_the_text_and_starts_with_a_synchronous_step() -> None:
    model, rate = replace(TINY, staged_blocks=4, block_bytes=(96,) * 4), only("rates", attention_flops=1.0)
    cost, whole = counted_cost(model, WORK, ParallelPlan(pipefusion=2), rate), 4 * 8 * 8 * 4
    assert cost.step_s == pytest.approx(whole * (2 + 6 / 2) / 8)
    assert cost.warmup_step_s == pytest.approx(whole)
    assert cost.image_s(4) == pytest.approx(whole + 3 * cost.step_s)


def test_pipefusion_waits_for_the_stage_with_the_most_blocks() -> None:
    model, work = replace(TINY, staged_blocks=3, block_bytes=(128,) * 3), Work(image_tokens=8, text_tokens=0)
    uneven = seconds(only("rates", attention_flops=1.0), work, model, pipefusion=2)
    assert uneven == pytest.approx(2 * 2 / 3 * (4 * 4 * 8 * 4))  # two patches, each through two of the three blocks


def test_sharded_weights_travel_and_hide_behind_the_rest() -> None:
    slow = only("link", bandwidth=1.0)
    assert seconds(slow, ulysses=2) < seconds(slow, ulysses=2, weights="sharded") == pytest.approx(384 / 2)
    hidden = replace(slow, rates=replace(UNIT.rates, attention_flops=1.0))
    assert seconds(hidden, ulysses=2, weights="sharded") == pytest.approx(seconds(hidden, ulysses=2))


def test_the_usual_model_has_the_weights_that_are_published() -> None:
    assert FLUX.weight_bytes / 2 == pytest.approx(11.90e9, rel=0.003)


def test_memory_follows_the_degrees() -> None:
    work, rates = Work(image_tokens=4096, text_tokens=512), known_calibration("A100").rates
    blocks, at_hand = sum(FLUX.block_bytes), BLOCKS_AT_HAND * FLUX.largest_block

    def of(**plan: int | str) -> object:
        return counted_memory(FLUX, work, ParallelPlan(**plan), rates)

    whole = of()
    assert (whole.weights, whole.buffers, whole.runtime, whole.host_bytes) == (
        FLUX.weight_bytes, 0, CUDA_CONTEXT_BYTES, 0,
    )  # fmt: skip
    assert of(ulysses=4).weights == whole.weights and of(ulysses=4).activations < whole.activations / 2
    assert of(ulysses=4, weights="sharded").weights == FLUX.weight_bytes - blocks + at_hand + blocks // 4
    offloaded = of(weights="offloaded")
    assert (offloaded.host_bytes, offloaded.weights) == (blocks, FLUX.weight_bytes - blocks + at_hand)
    piped = of(pipefusion=3)
    assert piped.weights < whole.weights / 2 < piped.weights * 2
    assert piped.buffers == 2 * 4608 * 3072 * 2 * 57 // 3


TWO_GUIDED = Work(image_tokens=4096, text_tokens=512, guided=True, batch=2)
ANY_PLAN = st.sampled_from(
    [plan for ranks in (1, 2, 3, 4, 6, 8) for plan in useful_plans(ranks, model=FLUX, work=TWO_GUIDED, stale=True)]
)
FACTOR = st.floats(1.0, 1000.0)
SPEEDS = ("matmul_flops", "attention_flops", "memory_bandwidth", "host_bandwidth")
BURDENS = ("merge_passes", "operation_s")
A_LITTLE = 1 + 1e-9  # sums in another order
UNEVEN = 1 + 8 / 1000  # a token more may be shared out more evenly


@st.composite
def works(draw) -> Work:
    return Work(
        image_tokens=draw(st.integers(1000, 20_000)),
        text_tokens=draw(st.integers(0, 600)),
        guided=True,
        batch=2,
        steps=draw(st.integers(1, 50)),
    )


@st.composite
def machines(draw) -> Calibration:
    return known_calibration(draw(st.sampled_from(["H100", "L40", "RTX 4090", "cpu"])))


@given(work=works(), plan=ANY_PLAN, machine=machines(), factor=FACTOR)
def test_a_faster_device_or_link_is_never_slower(work, plan, machine, factor) -> None:
    before = counted_cost(FLUX, work, plan, machine).step_s * A_LITTLE
    for name in SPEEDS:
        rates = replace(machine.rates, **{name: getattr(machine.rates, name) * factor})
        assert counted_cost(FLUX, work, plan, replace(machine, rates=rates)).step_s <= before
    faster = replace(machine.link, bandwidth=machine.link.bandwidth * factor)
    assert counted_cost(FLUX, work, plan, replace(machine, link=faster)).step_s <= before
    nearer = replace(machine.link, latency_s=machine.link.latency_s / factor)
    assert counted_cost(FLUX, work, plan, replace(machine, link=nearer)).step_s <= before


@given(work=works(), plan=ANY_PLAN, machine=machines(), factor=FACTOR)
def test_more_overhead_is_never_faster(work, plan, machine, factor) -> None:
    before = counted_cost(FLUX, work, plan, machine).step_s
    for name in BURDENS:
        software = replace(machine.software, **{name: getattr(machine.software, name) * factor})
        assert counted_cost(FLUX, work, plan, replace(machine, software=software)).step_s * A_LITTLE >= before


@given(work=works(), plan=ANY_PLAN, machine=machines(), image=st.integers(0, 5000), text=st.integers(0, 500))
def test_more_tokens_are_never_faster_and_never_smaller(work, plan, machine, image, text) -> None:
    more = replace(work, image_tokens=work.image_tokens + image, text_tokens=work.text_tokens + text)
    before, after = (counted_cost(FLUX, each, plan, machine).step_s for each in (work, more))
    assert after * UNEVEN >= before
    small, large = (counted_memory(FLUX, each, plan, machine.rates).total for each in (work, more))
    assert large * UNEVEN >= small


@given(work=works(), plan=ANY_PLAN, machine=machines())
def test_the_parts_of_a_step_add_up_and_none_is_negative(work, plan, machine) -> None:
    cost = counted_cost(FLUX, work, plan, machine)
    parts = (cost.compute_s, cost.communication_s, cost.launch_s)
    assert min(parts) >= 0
    assert sum(parts) == pytest.approx(cost.step_s)
    assert cost.warmup_step_s > 0
