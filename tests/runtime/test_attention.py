"""Attention over uneven heads, grouped heads and unequal lengths equals attention in one process, on real ranks.

Heads in chunks give the same bits as all at once, for the same bytes.
"""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from noted import FOLDER, Notes

from parallel_runtime.checkpoint import ModelSpec
from parallel_runtime.devices import parse_devices
from parallel_runtime.models.hosted.count import SilentAxis
from parallel_runtime.parallel.attention import SequenceParallelAttention
from parallel_runtime.parallel.collectives import Shift
from parallel_runtime.parallel.overlap import OverlapRates, SharedHeads
from parallel_runtime.parallel.wire_format import from_fp8, to_fp8
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.calls import ModelCall
from parallel_runtime.pool.pool import Pool

HERE = Path(__file__).parent
# fp32 sums in another order; without the exchange the least error of all cases is 0.3
TOLERANCE = 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_that_travel_as_fp8_round_to_a_16th_of_themselves_and_show_what_is_not_finite(
    dtype,
) -> None:
    numbers = torch.Generator().manual_seed(3)
    x = torch.randn(2, 3, 5, 16, generator=numbers) * torch.tensor([1e-3, 0, 1, 40, 9e3])[:, None]
    x[0, 0, 3, 0], x[0, 0, 4, 0] = torch.inf, torch.finfo(torch.float16).max
    x = x.to(dtype).transpose(1, 2)
    found = from_fp8(to_fp8(x), dtype)
    assert found.dtype == dtype and torch.equal(from_fp8(to_fp8(found), dtype).nan_to_num(), found.nan_to_num())
    assert found[0, 3, 0].isnan().all() and found.isnan().sum() == 16
    largest = x.float().abs().amax(-1, keepdim=True)
    bound = torch.maximum(x.float().abs(), largest * 2**-13) / 16
    assert ((found.float() - x.float()).abs() <= bound * 1.01)[~found.isnan()].all()
    assert (found != x).sum() > 100, "nothing was rounded"
    alone = SequenceParallelAttention()
    alone.exchange = "fp8"
    kept, _ = alone.whole_keys(x.contiguous(), x, lengths=[3])
    assert not alone.rounded and torch.equal(kept.nan_to_num(), x.nan_to_num()), "nothing travels from a rank alone"


PLANS = {
    "ulysses 2": ParallelPlan(ulysses=2),
    "ulysses 3": ParallelPlan(ulysses=3),
    "ulysses 4": ParallelPlan(ulysses=4),
    "ring 2": ParallelPlan(ring=2),
    "ring 3": ParallelPlan(ring=3),
    "ulysses 2 x ring 2": ParallelPlan(ring=2, ulysses=2),
}
# So slow a link that chunks pay from about 2,000 tokens on.
SLOW = OverlapRates(attention_flops=1e9, bandwidth=2e6, latency_s=0.0)
SELF, CROSS = (13, 29), (29, 11)
CASES: dict[str, dict] = {
    "heads that no degree divides": {"heads": 7, "groups": 7},
    "thirty heads": {"heads": 30, "groups": 30},
    "grouped heads": {"heads": 21, "groups": 7},
    "fewer groups than ranks": {"heads": 6, "groups": 1},
    "other lengths of keys": {"heads": 5, "groups": 5, "tokens": CROSS},
    "a rank without queries": {"heads": 5, "groups": 5, "tokens": (1, 29)},
    "values of another width": {"heads": 5, "groups": 5, "values": 24},
    "a scale of its own": {"heads": 5, "groups": 5, "scale": 0.4},
    "a mask of keys": {"heads": 5, "groups": 5, "mask": (2, 1, 1, "keys")},
    "a mask of scores, added": {"heads": 5, "groups": 5, "mask": (1, 1, "queries", "keys"), "boolean": False},
    "a mask by head": {"heads": 5, "groups": 5, "mask": (2, 5, "queries", "keys")},
    "keys that every rank has": {"heads": 21, "groups": 7, "common": 6},
    "and fewer groups than ranks": {"heads": 6, "groups": 1, "common": 6},
    "and ranks without others": {"heads": 5, "groups": 5, "common": 6, "tokens": (1, 1)},
    "and a mask": {"heads": 5, "groups": 5, "common": 6, "values": 24, "mask": (1, 1, "queries", "keys")},
}


def parts_of(tokens: int, parts: int) -> tuple[int, ...]:
    """Uneven on purpose: the last part has what the others leave."""
    base = tokens // parts
    return (*(base for _ in range(parts - 1)), tokens - base * (parts - 1))


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    engine, folders = "attention_engine:AttentionEngine", (str(HERE), FOLDER)
    devices = parse_devices("cpu:4").devices
    with Pool(devices, threads_per_rank=1, engine=engine, python_path=folders, overlap=lambda _: SLOW) as made:
        yield made


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    path = tmp_path_factory.mktemp("uneven") / "no.safetensors"
    path.write_bytes(b"nothing reads this")
    return ModelSpec.of(path)


def attended(pool: Pool, spec: ModelSpec, plan: ParallelPlan, case: dict, *, exchange: bool = True) -> list[dict]:
    """What each rank of the plan found."""
    tokens = case.get("tokens", SELF[1:] * 2)
    common = case.get("common", 0)
    sizes = {"queries": tokens[0], "keys": common + tokens[1]}
    options = {
        "heads": case["heads"],
        "groups": case["groups"],
        "queries": parts_of(tokens[0], plan.parts),
        "keys": parts_of(tokens[1], plan.parts),
        "common": common,
        "width": 16,
        "values": case.get("values", 16),
        "mask": [sizes.get(dim, dim) for dim in case.get("mask", ())],
        "boolean": case.get("boolean", True),
        "scale": case.get("scale"),
        "exchange": exchange,
    }
    with Notes() as found:
        call = ModelCall(tensors={}, out_shape=(1,), out_dtype=torch.float32, options={**options, **found.option})
        pool.run(spec, plan, [call])
        noted = found.read()
    assert len(noted) == plan.ranks
    return noted


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_attention_equals_one_process(pool: Pool, spec: ModelSpec, plan: ParallelPlan, case: dict) -> None:
    found = attended(pool, spec, plan, case)
    assert max(rank["error"] for rank in found) <= TOLERANCE
    assert all(rank["gathered"] for rank in found)
    for number, (calls, equal, same_bytes) in (each for rank in found for each in enumerate(rank["chunked"], 2)):
        assert equal and same_bytes, f"{number} chunks"
        if plan.ring == 1 and plan.ulysses <= case["groups"]:
            assert calls == min(number, case["groups"] // plan.ulysses)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_keys_that_every_rank_has_are_not_sent(pool: Pool, spec: ModelSpec, plan: ParallelPlan) -> None:
    without, some, many = (
        [rank["bytes"] for rank in attended(pool, spec, plan, {"heads": 7, "groups": 7, "common": common})]
        for common in (0, 6, 60)
    )
    assert without == some == many and min(without) > 0


def test_an_axis_without_other_ranks_counts_what_it_sends_and_gives_as_many_rows_as_each_would_send() -> None:
    axis = SilentAxis("ulysses", size=2)
    arrived = axis.all_to_all(torch.ones(9, 4), send_lengths=(5, 4), receive_lengths=(5, 7))
    assert arrived.shape == (5 + 7, 4)
    assert axis.traffic.num_bytes == 4 * 4 * torch.float32.itemsize


class SilentRing(SilentAxis):
    def start_shift(self, sent: torch.Tensor, arriving: torch.Tensor) -> Shift:
        arriving.zero_()
        return SimpleNamespace(wait=lambda: None)  # type: ignore[return-value]


@pytest.mark.parametrize(("ring", "chunks"), [(1, 1), (2, 3)])
def test_what_a_ranks_own_function_is_changes_no_exchange_where_ring_goes_from_machine_to_machine(
    ring: int, chunks: int
) -> None:
    """Ring attends with our kernels, so ranks with another function of ComfyUI's send as many chunks."""
    sent = []
    for alone in (True, False):
        ulysses = SilentAxis("ulysses", size=2)
        sequence = SequenceParallelAttention(ring=SilentRing("ring", size=ring), ulysses=ulysses, chunks=lambda _: 3)
        qkv, lengths = [torch.zeros(1, 6, 5, 16) for _ in range(3)], (5,) * 2 * ring
        sequence.attend(lambda qkv, *_: qkv[0], qkv, query_lengths=lengths, key_lengths=lengths, each_head_alone=alone)
        sent.append(ulysses.traffic.calls)
    assert sent == [3 * 2, chunks * 2]


def test_the_number_of_chunks_is_that_of_the_rank_with_the_most_heads() -> None:
    """The planner prices that rank: seven heads on two ranks are four heads' attention."""
    asked: list[SharedHeads] = []

    def one_chunk(shared: SharedHeads) -> int:
        asked.append(shared)
        return 1

    sequence = SequenceParallelAttention(
        ring=SilentRing("ring", size=1), ulysses=SilentAxis("ulysses", size=2), chunks=one_chunk
    )
    for heads in (7, 8):
        qkv = [torch.zeros(1, heads, 5, 16) for _ in range(3)]
        sequence.attend(lambda qkv, *_: qkv[0], qkv, query_lengths=(5, 5), key_lengths=(5, 5), each_head_alone=True)
    assert asked[0].flops == asked[1].flops > 0


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_without_the_exchange_it_does_not(pool: Pool, spec: ModelSpec, plan: ParallelPlan) -> None:
    found = attended(pool, spec, plan, CASES["grouped heads"], exchange=False)
    assert min(rank["error"] for rank in found) > 0.1


@pytest.mark.parametrize(
    ("plan", "case", "heads"),
    [
        ("ulysses 4", "thirty heads", [8, 8, 7, 7]),
        ("ulysses 3", "grouped heads", [9, 6, 6]),
        ("ulysses 2", "heads that no degree divides", [4, 3]),
        ("ulysses 2", "fewer groups than ranks", [6, 6]),
        ("ulysses 2 x ring 2", "a mask by head", [5, 5, 5, 5]),
    ],
)
def test_ranks_attend_with_whole_groups_of_heads(
    pool: Pool, spec: ModelSpec, plan: str, case: str, heads: list[int]
) -> None:
    found = attended(pool, spec, PLANS[plan], CASES[case])
    assert [rank["heads"] for rank in found] == [[count] for count in heads]


def test_a_run_whose_length_changes_the_number_of_chunks(pool: Pool, spec: ModelSpec) -> None:
    """Step by step as the pool's constants of devices and link say, on all ranks alike."""
    chunks = []
    for tokens in (2048, 29, 2048):
        found = attended(pool, spec, PLANS["ulysses 2"], {"heads": 32, "groups": 32, "tokens": (tokens, tokens)})
        assert max(rank["error"] for rank in found) <= TOLERANCE
        assert found[0]["heads"] == found[1]["heads"] and sum(found[0]["heads"]) == 16
        chunks.append(len(found[0]["heads"]))
    assert chunks[0] == chunks[2] > chunks[1] == 1
