"""Attention over uneven heads, grouped heads and unequal lengths equals attention in one process, on real ranks.

Each rank makes the whole of a call from a seed and attends with its part. Heads in chunks give the same bits as all at
once, for the same bytes.
"""

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rounding import ROUNDING

from parallel_runtime.models.hosted.count import OperationCounter, SilentAxis
from parallel_runtime.parallel import kernels, ring
from parallel_runtime.parallel.attention import SequenceParallelAttention
from parallel_runtime.parallel.kept_keys import HeldRows, KeptKeys
from parallel_runtime.parallel.kernels import Kernel
from parallel_runtime.parallel.overlap import OverlapRates, SharedHeads
from parallel_runtime.parallel.wire_format import from_fp8, to_fp8
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.proof import relative_error
from parallel_runtime.worker.mesh import Groups, Mesh
from parallel_runtime.worker.own_tokens import OwnTokens

from .gloo_group import GlooGroup
from .ranks import in_ranks

# fp32 sums in another order; without the exchange the least error of all cases is 0.3
CPU, GROUPS = torch.device("cpu"), Groups()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_that_travel_as_fp8_round_to_a_16th_of_themselves_and_show_what_is_not_finite(dtype) -> None:
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


PLANS = ("ulysses=2", "ulysses=3", "ulysses=4", "ring=2", "ring=3", "ulysses=2,ring=2")
OF_RANKS = [pytest.param(plan, ParallelPlan.parse(plan).ranks, id=plan) for plan in PLANS]
# So slow a link that chunks pay from about 2,000 tokens on.
SLOW = OverlapRates(attention_flops=1e9, bandwidth=2e6, latency_s=0.0)
SELF, CROSS, FEW_KEYS = (13, 29), (29, 11), (190, 7)
CASES: dict[str, dict] = {
    "heads that no degree divides": {"heads": 7, "groups": 7},
    "thirty heads": {"heads": 30, "groups": 30},
    "grouped heads": {"heads": 21, "groups": 7},
    "fewer groups than ranks": {"heads": 6, "groups": 1},
    "other lengths of keys": {"heads": 5, "groups": 5, "tokens": CROSS},
    "few keys": {"heads": 5, "groups": 5, "tokens": FEW_KEYS},
    "few keys of grouped heads, and others": {"heads": 21, "groups": 7, "tokens": FEW_KEYS, "values": 24, "common": 6},
    "few keys, and a mask by head": {"heads": 5, "groups": 5, "tokens": FEW_KEYS, "mask": (2, 5, "queries", "keys")},
    "few keys, and a scale": {"heads": 5, "groups": 5, "tokens": FEW_KEYS, "scale": 0.4, "mask": (2, 1, 1, "keys")},
    "a rank without queries": {"heads": 5, "groups": 5, "tokens": (1, 29)},
    "values of another width": {"heads": 5, "groups": 5, "values": 24, "tokens": (13, 90)},
    "a scale of its own": {"heads": 5, "groups": 5, "scale": 0.4},
    "a mask of keys": {"heads": 5, "groups": 5, "mask": (2, 1, 1, "keys")},
    "a mask of scores, added": {"heads": 5, "groups": 5, "mask": (1, 1, "queries", "keys"), "boolean": False},
    "a mask by head": {"heads": 5, "groups": 5, "mask": (2, 5, "queries", "keys")},
    "fewer groups, and a rank without queries": {"heads": 6, "groups": 1, "tokens": (1, 29), "values": 24},
    "keys that every rank has": {"heads": 21, "groups": 7, "common": 6},
    "and fewer groups than ranks": {"heads": 6, "groups": 1, "common": 6},
    "and ranks without others": {"heads": 5, "groups": 5, "common": 6, "tokens": (1, 1)},
    "and a mask": {"heads": 5, "groups": 5, "common": 6, "values": 24, "mask": (1, 1, "queries", "keys")},
}


def parts_of(tokens: int, parts: int) -> tuple[int, ...]:
    """Uneven on purpose: the last part has what the others leave."""
    base = tokens // parts
    return (*(base for _ in range(parts - 1)), tokens - base * (parts - 1))


def attended(plan: str, case: dict[str, Any], *, exchange: bool = True) -> SimpleNamespace:
    """Relative error of this rank's rows, the heads of each call of the kernel, what was sent, and of 2 and 3 chunks
    how many calls there were, whether they gave the same bits, and for the same bytes."""
    mesh = Mesh(ParallelPlan.parse(plan), device=CPU, groups=GROUPS, show_waiting=lambda _: None, overlap=SLOW)
    sequence, heads, groups = mesh.attention, case["heads"], case["groups"]
    (num_queries, num_keys), common = case.get("tokens", SELF[1:] * 2), case.get("common", 0)
    queries, keys = (parts_of(total, sequence.parts) for total in (num_queries, num_keys))
    scale = case.get("scale")
    numbers = torch.Generator().manual_seed(heads * 100 + groups)
    q, k, v = (
        torch.randn(2, count, tokens, size, generator=numbers)
        for count, tokens, size in (
            (heads, num_queries, 16),
            (groups, common + num_keys, 16),
            (groups, common + num_keys, case.get("values", 16)),
        )
    )
    mask = None
    if "mask" in case:
        sizes = {"queries": num_queries, "keys": common + num_keys}
        mask = torch.randn(*(sizes.get(dim, dim) for dim in case["mask"]), generator=numbers) * 2
        if case.get("boolean", True):
            mask = mask > -1
            mask[..., 0] = True  # no query without a key
    calls: list[int] = []

    def kernel(qkv: list[torch.Tensor], heads: int, mask: torch.Tensor | None) -> torch.Tensor:
        q, k, v = qkv
        assert q.shape[2], "some kernels refuse to be called for nothing"
        calls.append(heads)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])

    mine = [slice(sum(every[: sequence.index]), sum(every[: sequence.index + 1])) for every in (queries, keys)]
    own_keys = [*range(common), *range(common + mine[1].start, common + mine[1].stop)]
    want, parts = (
        kernel([q, k, v], heads, mask)[:, :, mine[0]],
        [q[:, :, mine[0]], k[:, :, own_keys], v[:, :, own_keys]],
    )

    def ran(chunks: Any = None) -> tuple[torch.Tensor, list[int], int]:
        calls.clear()
        mesh.traffic.reset()
        sequence.chunks = chunks or sequence.chunks
        given = {"query_lengths": queries, "key_lengths": keys, "mask": mask, "scale": scale, "common": common}
        out = sequence.attend(kernel, list(parts), **given) if exchange else kernel(parts, heads, None)
        return out, [*calls], mesh.traffic.num_bytes

    got, heads_of_calls, sent = ran()
    chunked = []
    for number in (2, 3):
        again, others, num_bytes = ran(lambda _, number=number: number)  # whether or not they pay
        chunked.append((len(others), torch.equal(again, got), num_bytes == sent))
    assert got.shape == want.shape, (got.shape, want.shape)
    assert torch.equal(sequence.gather(parts[1][:, :, common:], dim=2, lengths=keys), k[:, :, common:])
    error = relative_error(got, want) if want.numel() else 0.0
    return SimpleNamespace(error=error, heads=heads_of_calls, chunked=chunked, sent=sent)


@in_ranks(2)
def test_the_largest_of_all_ranks_is_every_ranks_and_counts_as_bytes_sent_to_each_other(group: GlooGroup) -> None:
    axis = group.axis
    mine = torch.tensor([float(axis.index), -float(axis.index), 7.0])
    assert axis.maximum(mine).tolist() == [axis.size - 1.0, 0.0, 7.0] and mine[0] == axis.index
    assert (axis.traffic.calls, axis.traffic.num_bytes) == (1, (axis.size - 1) * 12)


# Plan and case -> with how many heads each rank attends, which are whole groups.
HEADS = {
    ("ulysses=4", "thirty heads"): (8, 8, 7, 7),
    ("ulysses=3", "grouped heads"): (9, 6, 6),
    ("ulysses=2", "heads that no degree divides"): (4, 3),
    ("ulysses=2", "fewer groups than ranks"): (6, 6),
    ("ulysses=2,ring=2", "a mask by head"): (5, 5, 5, 5),
    ("ulysses=2", "few keys"): (5, 5),
    ("ulysses=2,ring=2", "few keys"): (5, 5, 5, 5),
    ("ulysses=4", "few keys of grouped heads, and others"): (21, 21, 21, 21),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("plan", "ranks"), OF_RANKS)
@in_ranks()
def test_attention_equals_one_process(group: GlooGroup, plan: str, case: str) -> None:
    found, parsed = attended(plan, CASES[case]), ParallelPlan.parse(plan)
    assert found.error <= ROUNDING
    assert (plan, case) not in HEADS or found.heads == [HEADS[plan, case][group.index]]
    for number, (calls, equal, same_bytes) in enumerate(found.chunked, 2):
        assert equal and same_bytes, f"{number} chunks"
        if parsed.ring == 1 and parsed.ulysses <= CASES[case]["groups"]:
            most = CASES[case]["groups"] // parsed.ulysses if not case.startswith("few keys") else 1
            assert calls == min(number, most)


@pytest.mark.parametrize(("plan", "ranks"), OF_RANKS)
@in_ranks()
def test_keys_that_every_rank_has_are_not_sent(group: GlooGroup, plan: str) -> None:
    sent = [attended(plan, {"heads": 7, "groups": 7, "common": common}).sent for common in (0, 6, 60)]
    assert sent[0] == sent[1] == sent[2] > 0


@pytest.mark.parametrize(("plan", "ranks"), OF_RANKS)
@in_ranks()
def test_few_keys_are_sent_to_all_ranks_in_place_of_many_queries(group: GlooGroup, plan: str) -> None:
    sent, parts = attended(plan, CASES["few keys"]).sent, ParallelPlan.parse(plan).parts
    few, token_bytes = parts_of(7, parts), 2 * 5 * (16 + 16) * 4
    if "ulysses" in plan:
        assert sent == (parts - 1) * max(few) * token_bytes
    else:
        assert sent == (7 - few[(group.index + 1) % parts]) * token_bytes, "around a ring as ever"


@pytest.mark.parametrize(
    ("degrees", "heads_a_group", "queries", "keys", "less"),
    [
        ((1, 4), 1, (4000,) * 4, (32,) * 4, True),
        ((1, 4), 1, (4000,) * 4, (300,) * 4, True),
        ((1, 4), 1, (40,) * 4, (40,) * 4, False),
        ((1, 4), 6, (40,) * 4, (40,) * 4, False),  # less, but in chunks they hide
        ((1, 2), 1, (40, 40), (10, 11), True),
        ((1, 2), 1, (40, 40), (20, 21), False),  # less, but not half of it: in chunks most of the heads hides
        ((1, 2), 1, (40, 40), (0, 21), False),  # one rank has all, and every message is as long
        ((4, 1), 1, (40,) * 4, (1,) * 4, False),  # a ring sends the same
        ((2, 2), 1, (40,) * 4, (4,) * 4, True),
        ((2, 2), 1, (40,) * 4, (9,) * 4, False),
    ],
)
def test_keys_are_sent_to_all_where_that_is_less(
    degrees: tuple[int, int], heads_a_group: int, queries: Any, keys: Any, less: bool
) -> None:
    ring, ulysses = degrees
    sequence = SequenceParallelAttention(
        ring=SilentRing("ring", size=ring), ulysses=SilentAxis("ulysses", size=ulysses)
    )
    assert sequence.sends_less_as_keys(heads_a_group, queries, keys) is less


class SilentRing(SilentAxis):
    def start_shift(self, send: torch.Tensor, shape: tuple[int, ...]) -> Any:
        return SimpleNamespace(wait=lambda: send.new_zeros(shape))


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


@pytest.mark.parametrize(("exchange", "sent_bytes"), [("exact", 4), ("fp8", 1 + 1 / 16)])
def test_the_number_of_chunks_is_that_of_the_rank_with_the_most_heads(exchange: str, sent_bytes: float) -> None:
    """The planner prices that rank: seven groups of two heads on two ranks are four groups' attention."""
    asked: list[SharedHeads] = []

    def one_chunk(shared: SharedHeads) -> int:
        asked.append(shared)
        return 1

    ulysses = SilentAxis("ulysses", size=2)
    sequence = SequenceParallelAttention(ring=SilentRing("ring", size=1), ulysses=ulysses, chunks=one_chunk)
    sequence.exchange = exchange
    for groups in (7, 8):
        qkv = [torch.zeros(3, 2 * groups, 5, 16), torch.zeros(3, groups, 2 + 6, 16), torch.zeros(3, groups, 2 + 6, 24)]
        given = {"query_lengths": (5, 4), "key_lengths": (6, 3), "common": 2}
        out = sequence.attend(lambda qkv, *_: qkv[0].new_zeros(*qkv[0].shape[:3], 24), qkv, **given)
        assert out.shape == (3, 2 * groups, 5, 24) and sequence.rounded == (exchange == "fp8")
        flops = 2.0 * 3 * (2 * 4) * (5 + 4) * (2 + 6 + 3) * (16 + 24)
        half = 3 * sent_bytes / 2  # of what a rank has, as much as it sends to the other
        arriving, returning = half * (5 * 2 * groups * 16 + 6 * groups * (16 + 24)), half * 5 * 2 * groups * 24
        assert asked.pop() == SharedHeads(
            groups=groups,
            ranks=2,
            keys=11,
            head_dim=16,
            flops=flops,
            arriving_bytes=arriving,
            returning_bytes=returning,
        )


@pytest.mark.parametrize(("mask", "keys_at_once"), [(None, 0), ((1, 1, 10, 10), 0), ((1, 6, 1, 10), 10)])
def test_ring_takes_one_mask_for_all_heads_and_for_a_mask_a_head_ranks_have_all_keys(
    mask: Any, keys_at_once: int
) -> None:
    """Ring attends with our kernels; over all keys the model's own function does."""
    seen, qkv = [0], [torch.zeros(1, 6, 5, 16) for _ in range(3)]

    def kernel(qkv: list[torch.Tensor], *_: Any) -> torch.Tensor:
        seen.append(qkv[1].shape[2])
        return qkv[0]

    sequence = SequenceParallelAttention(ring=SilentRing("ring", size=2))
    lengths = {"query_lengths": (5, 5), "key_lengths": (5, 5)}
    sequence.attend(kernel, qkv, **lengths, mask=None if mask is None else torch.zeros(mask))
    assert seen[-1] == keys_at_once


@pytest.mark.parametrize("boolean", [True, False])
@pytest.mark.parametrize("kernel", [Kernel.EFFICIENT, Kernel.EFFICIENT_FP32])
def test_one_row_of_a_mask_for_all_queries_is_held_once_by_every_hop(
    monkeypatch: pytest.MonkeyPatch, kernel: Kernel, boolean: bool
) -> None:
    """Of 7 keys, which are padded, and of 8, which are not. The CPU's kernel stands for the memory-efficient one."""
    held = list[tuple[int, int]]()

    def efficient(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        *qkv, bias, _ = given
        assert bias.shape == (2, 6, 50, qkv[1].shape[2]) and bias.dtype == torch.float32
        held.append((bias.stride(2), bias.untyped_storage().nbytes()))
        return kernels._cpu(*qkv, bias[:, 0])

    monkeypatch.setattr(kernels, "choose_kernel", lambda *_, **__: kernel)
    monkeypatch.setattr(kernels.aten, "_scaled_dot_product_efficient_attention", efficient)
    row_bytes = 2 * 8 * 4
    for keys in ((8, 7), (8, 8)):
        numbers, found = torch.Generator().manual_seed(3), list[torch.Tensor]()
        q, row = torch.randn(2, 6, 50, 16, generator=numbers), torch.randn(2, 1, 1, sum(keys), generator=numbers)
        row = row > -1 if boolean else row
        rows = row.expand(-1, -1, 100, -1)
        for mask in (row, rows, rows.contiguous()):
            sequence = SequenceParallelAttention(ring=SilentRing("ring", size=2))
            qkv = [q, q[:, :, :8], q[:, :, :8] + 1]
            lengths = {"query_lengths": (50, 50), "key_lengths": keys}
            found.append(sequence.attend(lambda *_: pytest.fail("a ring has kernels"), qkv, **lengths, mask=mask))
        assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[2])
        assert all(each[0] == 0 and each[1] == row_bytes for each in held[:4]), held
        assert all(each[0] == 8 and each[1] == 50 * row_bytes for each in held[4:]), held
        held.clear()


@pytest.mark.parametrize("common", [0, 2])
@pytest.mark.parametrize("ulysses", [1, 2])
def test_of_keys_that_go_around_a_rank_holds_the_copy_alone(
    monkeypatch: pytest.MonkeyPatch, ulysses: int, common: int
) -> None:
    held = list[bool]()

    def attend(_: str, q: torch.Tensor, *kv: torch.Tensor, mask: None) -> tuple[torch.Tensor, torch.Tensor]:
        held.append(any(each() is not None for each in own))
        assert q.untyped_storage().nbytes() == q.nbytes, "the buffer in which all heads arrived"
        return kernels._cpu(*(each.transpose(1, 2) for each in (q, *kv)), None)[0].transpose(1, 2), q[..., :1].float()

    monkeypatch.setattr(ring, "attend_with_lse", attend)
    sequence = SequenceParallelAttention(ring=SilentRing("ring", size=2), ulysses=SilentAxis("ulysses", size=ulysses))
    qkv = [torch.ones(1, 4, tokens, 16) for tokens in (5, common + 5, common + 5)]
    own, lengths = [weakref.ref(each.untyped_storage()) for each in qkv[1:]], (5,) * 2 * ulysses
    sequence.attend(lambda *_: qkv[0], qkv, query_lengths=lengths, key_lengths=lengths, common=common)
    assert held == [False] * (2 + bool(common))


def test_the_control_attends_to_own_tokens_alone_and_to_none_where_it_has_none() -> None:
    def kernel(qkv: list[torch.Tensor], heads: int, mask: torch.Tensor | None) -> torch.Tensor:
        assert (qkv[0].shape[2], heads, mask) == (2, 3, None)
        return qkv[0] + 1

    for tokens, added in ((2, 1), (0, 0)):
        rows = torch.zeros(1, 3, tokens, 4)
        out = OwnTokens().attend(kernel, [rows] * 3, query_lengths=(2, 2), key_lengths=(2, 2), mask=rows)
        assert torch.equal(out, rows + added)


class Copying(SilentAxis):
    """Two ranks that send the same. `memory`: where what is sent and what arrives lie."""

    memory: tuple[int, int]

    def all_gather(self, mine: torch.Tensor, whole: torch.Tensor) -> None:
        super().all_gather(mine, whole)
        self.memory = mine.data_ptr(), whole.data_ptr()
        whole.view(self.size, -1).copy_(mine)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_parts_of_one_length_are_sent_and_returned_where_they_lie(dtype: torch.dtype) -> None:
    axis = Copying("ulysses", size=2)
    sequence = SequenceParallelAttention(ulysses=axis)
    for dim, shape in ((0, (5, 3, 4)), (2, (3, 4, 5, 2))):
        numbers = torch.randn(5, *(size for place, size in enumerate(shape) if place != dim)) > 0
        mine = numbers.to(dtype).movedim(0, dim)
        whole = sequence.gather(mine, dim=dim, lengths=(5, 5))
        assert axis.memory == (mine.data_ptr(), whole.data_ptr())
        assert whole.untyped_storage().nbytes() == 2 * mine.nbytes
        assert torch.equal(whole, torch.cat((mine, mine), dim)) and whole.movedim(dim, 0).is_contiguous()
        shorter = sequence.gather(mine, dim=dim, lengths=(5, 3))
        assert torch.equal(shorter, whole.narrow(dim, 0, 8)) and shorter.stride() == whole.stride()
        assert sequence.gather(mine.contiguous(), dim=dim, lengths=(5, 5)).stride() == whole.stride()


def test_keys_that_are_gathered_are_copied_once() -> None:
    axis = Copying("ulysses", size=2)
    k, v = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 5, 8)
    counter = OperationCounter()
    with counter:
        keys, values = SequenceParallelAttention(ulysses=axis).whole_keys(k, v, lengths=(5, 5))
    assert counter.counts["held_bytes"] == (1 + axis.size) * (k.nbytes + v.nbytes)
    assert torch.equal(keys, torch.cat((k, k), 2)) and torch.equal(values, torch.cat((v, v), 2))


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("axis", ["ulysses", "ring"])
def test_keys_that_were_sent_or_kept_are_let_go_before_attention(axis: str, kept: bool) -> None:
    def kernel(qkv: list[torch.Tensor], *_: Any) -> torch.Tensor:
        assert all(each() is None for each in own) and qkv[1].shape[2] == 10
        left = [weakref.ref(each) for each in qkv]
        qkv.clear()
        assert [each() is not None for each in left] == [False, kept, kept]
        return torch.zeros(1, 4, 5, 16)

    sequence = SequenceParallelAttention(**{axis: Copying(axis, size=2)})
    qkv = [torch.ones(1, heads, 5, 16) for heads in (4, 1, 1)]
    own = [weakref.ref(each.untyped_storage()) for each in qkv[1:]]
    keeps = KeptKeys(rows=HeldRows(), site="", places=slice(0, 10), total=10, fresh=False) if kept else None
    mask = torch.zeros(1, 4, 1, 10)  # a ring gathers keys where it differs by head
    lengths = (5, 5)
    out = sequence.attend(kernel, qkv, query_lengths=lengths, key_lengths=lengths, mask=mask, kept=keeps)
    assert out.shape == (1, 4, 5, 16)


def test_of_no_rows_nothing_is_sent() -> None:
    axis = SilentAxis("ulysses", size=2)
    rows = torch.zeros(2, 0, 3)
    assert SequenceParallelAttention(ulysses=axis).gather(rows, dim=1, lengths=(0, 0)) is rows
    assert axis.traffic.calls == 0


@pytest.mark.parametrize(("plan", "ranks"), OF_RANKS)
@in_ranks()
def test_without_the_exchange_it_does_not(group: GlooGroup, plan: str) -> None:
    assert attended(plan, CASES["grouped heads"], exchange=False).error > 0.1


@in_ranks(2)
def test_a_run_whose_length_changes_the_number_of_chunks(group: GlooGroup) -> None:
    """Step by step as the constants of devices and link say, alike on all ranks, or they would wait for each other."""
    chunks = []
    for tokens in (768, 29, 768):
        found = attended("ulysses=2", {"heads": 32, "groups": 32, "tokens": (tokens, tokens)})
        assert found.error <= ROUNDING and sum(found.heads) == 16
        chunks.append(len(found.heads))
    assert chunks[0] == chunks[2] > chunks[1] == 1
