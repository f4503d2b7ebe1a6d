"""What a plan takes on a rank, worked out by hand for a small model: 100 tokens, four blocks of 800 of 1000 bytes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel_runtime.exchange_formats import CODED_BYTES, DECODED_BYTES
from parallel_runtime.models.hosted.count import OperationCounter, SilentAxis
from parallel_runtime.parallel.attention import SequenceParallelAttention
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.planner.counted import CountedModel, amounts_of, kept_by_class, kept_bytes_of
from parallel_runtime.planner.known import known_rates
from parallel_runtime.planner.memory import (
    PlannedMemory,
    bytes_by_rank,
    bytes_of,
    communicators,
    kept_groups_bytes,
    memory_of,
    runtime_bytes,
    where_kept,
)
from parallel_runtime.planner.work import Work

MIB = 2**20
GPU = known_rates("L40")
CPU = replace(GPU, asynchronous=False)
MODEL = CountedModel(
    name="small",
    whole={
        **{"held_bytes": (0.0, 10.0), "query_bytes": (0.0, 8.0), "key_bytes": (0.0, 4.0), "exchanges": (2.0,)},
        "module.operations": (7.0,),
    },
    shared={},
    numbers_per_token=2.0,
    key_heads=4,
    weight_bytes=1000,
    block_bytes=(300, 200, 100, 200),
    staged_blocks=4,
)
WORK = Work(image_tokens=100, text_tokens=0)


def needed(text: str, work: Work = WORK, model: CountedModel = MODEL) -> PlannedMemory:
    return memory_of(model, work, ParallelPlan.parse(text), CPU)


@pytest.mark.parametrize(
    ("plan", "weights", "activations", "buffers", "host", "shared"),
    [
        ("ulysses=1", 1000, 1000, 0, 0, 0),
        ("ulysses=2", 1000, 1000, 0, 0, 0),  # what an all-to-all holds was counted
        ("ulysses=2,weights=sharded", 1200, 1000, 0, 0, 400),  # 200, two blocks at hand, half of all
        ("ulysses=2,weights=offloaded", 800, 1000, 0, 400, 0),
        ("weights=offloaded", 800, 1000, 0, 800, 0),
        ("pipefusion=2", 600, 1000, 200, 0, 400),  # half of the keys
        ("pipefusion=2,ulysses=2,weights=sharded", 800, 1000, 900, 0, 200),
    ],
)
def test_a_plan_takes_weights_activations_and_buffers(
    plan: str, weights: int, activations: int, buffers: int, host: int, shared: int
) -> None:
    runtime = 350 * MIB
    assert needed(plan) == PlannedMemory(
        **{"weights": weights, "activations": activations, "buffers": buffers, "runtime": runtime},
        **{"host_bytes": host, "shared": shared, "graphs": 0},
    )
    assert needed(plan).total == weights + activations + buffers + runtime


class OneRank(SilentAxis):
    """The first rank of several, what comes around a ring included."""

    def start_shift(self, send: Tensor, shape: tuple[int, ...]) -> Any:
        """Zeros, which are there at once."""
        return super().start_all_gather(send, send.new_zeros(shape))


SIZE = 256  # of a head, numbers


def measured_peak(heads: int, key_heads: int, plan: ParallelPlan, *, chunks: int = 1, size: int = SIZE) -> int:
    """Bytes that the first rank's attention to 480 tokens holds at once in bf16, counted through what ranks run. A CPU
    sums the softmax up in fp64, which hardly shows beside such wide heads."""
    parts, counter = plan.parts, OperationCounter()
    each = [480 // parts] * parts
    axes = {name: OneRank(name, size=getattr(plan, name)) for name in ("ring", "ulysses")}
    shared = SequenceParallelAttention(**axes, whole=OneRank("whole", size=parts), chunks=lambda _: chunks)

    def kernel(qkv: list[Tensor], *_: object) -> Tensor:
        q, _, _ = qkv
        qkv.clear()
        return torch.empty_like(q)

    with torch.no_grad(), counter:
        qkv = [torch.zeros(1, count, each[0], size, dtype=torch.bfloat16) for count in (heads, key_heads, key_heads)]
        shared.attend(kernel, qkv, query_lengths=each, key_lengths=each)
    return round(counter.counts["held_bytes"])


@pytest.mark.parametrize(("heads", "key_heads"), [(40, 40), (30, 30), (24, 24), (32, 8), (4, 4), (8, 2)])
@pytest.mark.parametrize(
    "text",
    ["ulysses=2", "ulysses=4", "ulysses=5", "ulysses=8", "ring=2", "ring=3", "ring=8"]
    + ["ring=2,ulysses=2", "ring=3,ulysses=2"],
)
def test_the_exchange_of_an_attention_takes_what_ranks_hold_of_it_and_little_more(
    heads: int, key_heads: int, text: str
) -> None:
    """Counted with two ranks, as every model is; held to what the first of so many ranks has in memory."""
    plan, token = ParallelPlan.parse(text), SIZE * 2
    counted = measured_peak(heads, key_heads, ParallelPlan(ulysses=2)) / (480 / 2)
    whole = {"query_bytes": (0.0, 2.0 * heads * token), "key_bytes": (0.0, 2.0 * key_heads * token)}
    whole["exchanges"] = (1.0,)
    model = replace(MODEL, whole=whole, shared={"held_bytes": (0.0, counted)}, key_heads=key_heads)
    found = memory_of(model, replace(WORK, image_tokens=480), plan, GPU)
    chunks = (1, 2, 4) if plan.ulysses > 1 and key_heads >= 2 * plan.ulysses else (1,)
    measured = max(measured_peak(heads, key_heads, plan, chunks=each) for each in chunks)
    assert 0.99 * measured <= found.activations + found.buffers <= 1.12 * measured


def test_rows_of_a_batch_take_more_and_replicas_of_it_hold_all_blocks() -> None:
    guided = replace(WORK, guided=True, batch=2)
    assert (needed("ulysses=2", guided).activations, needed("ulysses=2", guided).buffers) == (4000, 0)
    assert needed("ring=2", guided).buffers == 4 * needed("ring=2").buffers > 0
    assert needed("data=2,ulysses=2,weights=sharded", guided).weights == 1200
    assert needed("pipefusion=2", guided).buffers == 800


@pytest.mark.parametrize(
    ("plan", "guided", "graphs"),
    [
        ("ulysses=2", False, 4 * 100 + 1000 + 7 * 10240),
        ("ulysses=2", True, 2 * (2 * 4 * 100 + 1000) + 2 * 7 * 10240),  # two texts have two sets of graphs
        ("cfg=2", True, 4 * 200 + 1000 + 7 * 10240),
        ("ring=2", False, 0),
    ],
)
def test_graphs_of_blocks_take_buffers_a_pool_and_their_nodes(plan: str, guided: bool, graphs: int) -> None:
    assert memory_of(MODEL, replace(WORK, guided=guided), ParallelPlan.parse(plan), GPU).graphs == graphs


def test_torch_and_nccl_take_their_part() -> None:
    assert bytes_of([2, 4]) == 2 * 16 * MIB + (1 + 3) * 36 * MIB
    assert runtime_bytes(ParallelPlan(), CPU, 4) == 350 * MIB
    assert runtime_bytes(ParallelPlan(), GPU, 1) == 700 * MIB and communicators(ParallelPlan(), 1) == ()
    assert communicators(both := ParallelPlan(ring=2, ulysses=2), 4) == (4, 2, 2)
    assert runtime_bytes(both, GPU, 4) == (700 + 128 + 3 * 16 + (3 + 1 + 1) * 36) * MIB + kept_groups_bytes(4)


@pytest.mark.parametrize(
    ("guided", "plan", "free", "place"),
    [
        (False, "ulysses=1", 1801, "gpu"),  # of 1800 bytes 1000 are weights, and four times what a call keeps is 800
        (False, "ulysses=1", 1800, "cpu"),
        (True, "ulysses=1", 1801, "gpu"),  # prompt and negative are two calls
        (True, "cfg=2", 1801, "gpu"),
    ],
)
def test_what_a_class_keeps_lies_on_the_device_where_four_times_that_is_free(
    guided: bool, plan: str, free: int, place: str
) -> None:
    model, work = replace(MODEL, kept_bytes={"default": (0.0, 2.0)}), replace(WORK, guided=guided)
    memory = PlannedMemory(weights=900, activations=0, buffers=0, runtime=100)
    found = where_kept(model, work, ParallelPlan.parse(plan), memory, free=free)
    assert found.kept_on == place
    for told in (replace(work, kept_on=where) for where in ("gpu", "cpu", "off")):  # the node says where
        for room in (0, 9**9):
            assert where_kept(model, told, ParallelPlan.parse(plan), memory, free=room) == told
    assert where_kept(MODEL, work, ParallelPlan.parse(plan), memory, free=0) == work, "it keeps nothing"
    assert kept_by_class(model, found, GPU) == ((200.0, 0.0) if place == "gpu" else (0.0, 200.0))
    assert kept_by_class(model, found, CPU) == (200.0, 0.0) and kept_by_class(model, told, GPU) == (0.0, 0.0)
    placed = memory_of(model, found, ParallelPlan(), GPU)
    rows = found.rows
    assert (placed.activations, placed.host_bytes) == (
        (rows * 1200, 0) if place == "gpu" else (rows * 1000, rows * 200)
    )


def test_a_model_says_what_its_ranks_can_share() -> None:
    assert (MODEL.heads, MODEL.largest_block, MODEL.image_tokens(6.8), MODEL.image_tokens(0.1)) == (4, 300, 3, 1)
    assert MODEL.head_dim(replace(WORK, image_tokens=100)) == 1  # 400 bytes of keys and values, of two attentions
    wide = replace(MODEL, whole={**MODEL.whole, "key_bytes": (0.0, 2.0 * 2 * 2 * 4 * 16)})
    assert wide.head_dim(WORK) == 16
    alone = replace(MODEL, key_heads=0, staged_blocks=0)
    assert (alone.heads, alone.shares_tokens, replace(alone, block_bytes=()).largest_block) == (1, False, 1000)
    for model, texts in (
        (MODEL, {"pipefusion=4": True, "ulysses=2": True}),
        (replace(MODEL, staged_blocks=2), {"pipefusion=3": False, "pipefusion=2": True}),
        (alone, {"ulysses=2": False, "data=2": True, "pipefusion=2": False, "ulysses=1": True}),
        (
            replace(MODEL, whole_batches=True),
            {"data=2": False, "data=2,ulysses=2,weights=sharded": True, "ring=2": True},
        ),
    ):
        assert {text: model.may_run(ParallelPlan.parse(text)) for text in texts} == texts


@pytest.mark.parametrize(
    ("plan", "moved"),
    [
        ("ulysses=1", 0.0),
        ("ulysses=2", (CODED_BYTES + DECODED_BYTES) * (800 + 400) / 2 / 2),
        ("ring=2", (CODED_BYTES + DECODED_BYTES) * 400 / 2 / 2),
        ("ring=3", (CODED_BYTES + 2 * DECODED_BYTES) * 400 / 3 / 2),
        ("ring=2,ulysses=2", (CODED_BYTES + DECODED_BYTES) * (400 + 800 + 400) / 4 / 2),
    ],
)
def test_heads_that_travel_as_fp8_are_coded_and_decoded(plan: str, moved: float) -> None:
    found = amounts_of(MODEL, replace(WORK, exchange="fp8"), ParallelPlan.parse(plan))
    assert found.moved_bytes == pytest.approx(moved)
    assert amounts_of(MODEL, WORK, ParallelPlan.parse(plan)).moved_bytes == 0.0


def test_amounts_are_read_from_what_was_counted() -> None:
    alone = amounts_of(MODEL, WORK, ParallelPlan())
    assert (alone.exchanges, alone.gathers, alone.arriving_bytes, alone.hop_bytes, alone.operations) == (0, 0, 0, 0, 7)
    few = amounts_of(MODEL, WORK, ParallelPlan(ulysses=8))  # of four heads: keys are gathered
    assert (few.arriving_bytes, few.returning_bytes, few.exchanges) == (pytest.approx(400 / 8 * 7), 0.0, 2.0)
    every = replace(MODEL, whole={"held_bytes": (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)})
    assert every.count("held_bytes", Work(image_tokens=2, text_tokens=3)) == 1 + 4 + 12 + 12 + 30 + 54
    assert replace(MODEL, key_heads=1).shares_tokens
    kept = replace(MODEL, kept_bytes={"default": (100.0,), "fp8": (50.0,)})
    formats = {kept_as: kept_bytes_of(kept, replace(WORK, kept_as=kept_as)) for kept_as in ("fp8", "default", "other")}
    assert formats == {"fp8": 50.0, "default": 100.0, "other": 100.0}


def test_ranks_of_equal_shares_take_the_same() -> None:
    memory = PlannedMemory(weights=10, activations=3, buffers=2, runtime=5)
    assert (memory.host_bytes, memory.shared) == (0, 0)
    for plan in (ParallelPlan(ulysses=2), ParallelPlan(pipefusion=2), ParallelPlan(ulysses=2, weights="sharded")):
        assert bytes_by_rank(replace(memory, shared=4), plan) == (20, 20)


@pytest.mark.parametrize(
    ("plan", "sent", "hop"),
    [
        ("ulysses=1", 0, 0),
        ("ulysses=2", (800 - 300 + 400 - 20) / 2 / 2 + 20 / 2, 0),
        ("ulysses=4", (800 - 300 + 400 - 20) / 4 * 3 / 4 + 20 / 4 * 3, 0),
        ("ulysses=8", 400 / 8 * 7, 0),  # of four heads: all keys are gathered
        ("ring=2", 0, 400 / 2),  # around a ring as much is sent
        ("ulysses=2,ring=2", (800 - 300 + 400 - 20) / 4 / 2 + 20 / 4 * 3, (400 - 20) / 4),
        ("pipefusion=2,ulysses=2", (800 + 400) / 2 / 2, 0),  # whose keys are kept
    ],
)
@pytest.mark.parametrize("many", [False, True])
def test_few_keys_are_sent_to_all_ranks_where_that_is_less(plan: str, sent: float, hop: float, many: bool) -> None:
    few = {"few_keys.query_bytes": (0.0, 3.0), "few_keys.key_bytes": (20.0,)}
    parsed, model = ParallelPlan.parse(plan), replace(MODEL, whole={**MODEL.whole, **few})
    if many:  # as many as there are queries are sent as ever
        model = replace(model, whole={**model.whole, "few_keys.key_bytes": (0.0, 3.0)})
        known = amounts_of(MODEL, WORK, parsed)
        sent, hop = known.arriving_bytes + known.returning_bytes, known.hop_bytes
    found = amounts_of(model, WORK, parsed)
    assert (found.arriving_bytes + found.returning_bytes, found.hop_bytes) == (pytest.approx(sent), hop)
