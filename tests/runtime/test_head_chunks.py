"""When heads in chunks are sent, waited for and attended to, over a link and a clock that are simulated.

That chunks change no bit is `models/test_attention.py`'s and `models/test_hosted_parity.py`'s.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.emulated_link import EmulatedAxis, SimulatedClock
from benchmarks.head_chunks import CASES, LATENCY_S, Case
from parallel_runtime.parallel.attention import QKV, SequenceParallelAttention
from parallel_runtime.parallel.overlap import possible_chunks
from parallel_runtime.parallel.shard import split_lengths

from .test_pattern import Threads, Wire

TOKENS = 8


def simulated(case: Case, chunks: int) -> EmulatedAxis:
    """One attention with few tokens, each head and exchange of which takes as long as on the card."""
    clock, lengths = SimulatedClock(), split_lengths(TOKENS, case.ranks)
    sent = 4 * lengths[0] * case.heads * case.head_dim * (case.ranks - 1) / case.ranks * 4  # bytes, in fp32
    bandwidth = sent / (case.exchange_s(1) - 2 * LATENCY_S)
    axis = EmulatedAxis("ulysses", case.ranks, 0, clock=clock, bandwidth=bandwidth, latency_s=LATENCY_S)

    def kernel(qkv: QKV, heads: int, mask: torch.Tensor | None) -> torch.Tensor:
        q = qkv[0]
        qkv.clear()
        axis.events.append(("attend", heads))
        clock.spend(case.attend_s * heads * case.ranks / case.heads)
        return q

    sequence = SequenceParallelAttention(ulysses=axis, chunks=lambda _: chunks)
    qkv = [torch.zeros(1, case.heads, lengths[0], case.head_dim) for _ in range(3)]
    sequence.attend(kernel, qkv, query_lengths=lengths, key_lengths=lengths)
    return axis


def test_while_a_chunk_is_attended_to_the_next_arrives_and_the_one_before_goes_back() -> None:
    axis = simulated(Case("three heads a rank", 1000, 6, 2, 1e9, head_dim=4), 3)
    there, back = {0: 0, 1: 1, 2: 2}, {0: 3, 1: 4, 2: 5}  # the exchange of each chunk, in the order of their starts
    assert axis.events == [
        ("start", there[0]),
        ("wait", there[0]),
        ("start", there[1]),
        ("let pass", there[1]),
        ("attend", 1),
        ("wait", there[1]),
        ("start", there[2]),
        ("start", back[0]),
        ("let pass", back[0]),
        ("attend", 1),
        ("wait", there[2]),
        ("start", back[1]),
        ("let pass", back[1]),
        ("attend", 1),
        ("wait", back[0]),
        ("wait", back[1]),
        ("start", back[2]),
        ("wait", back[2]),
    ]


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case.model}, {case.ranks} cards, {case.bandwidth / 1e9:.0f}"
)
def test_the_part_of_an_exchange_that_shows_is_what_the_formula_says(case: Case) -> None:
    for chunks in (1, case.chunks):
        clock = simulated(case, chunks).clock
        assert clock.now() - case.attend_s == pytest.approx(case.exposed(chunks) * case.exchange_s(1))
    assert case.exposed(1) == pytest.approx(1.0), "without chunks all of it shows"
    if case.tokens > 20_000:  # of images, attention is shorter than the exchange
        assert case.exposed(case.chunks) <= 1 / case.chunks + 0.05
        assert case.chunks >= 5 and case.exposed(case.chunks) <= 0.25
    else:
        quickest = min(case.exposed(each) for each in possible_chunks(case.heads, case.ranks))
        assert case.exposed(case.chunks) <= quickest + 0.06


class Copies(TorchDispatchMode):
    """Counts what is copied from one tensor into another."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._overloadpacket in (torch.ops.aten.copy_, torch.ops.aten.clone, torch.ops.aten.cat)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("heads", "ranks", "chunks", "packs"), [(24, 2, 1, 3), (24, 8, 3, 3), (40, 8, 5, 3), (30, 8, 3, 6)]
)
def test_packing_takes_as_many_copies_whatever_the_number_of_ranks(
    heads: int, ranks: int, chunks: int, packs: int
) -> None:
    """One a tensor; two where heads do not come out even. Behind them one for each chunk's output, and one for all."""
    with Copies() as copies:
        simulated(Case("", 1000, heads, ranks, 1e9, head_dim=4), chunks)
    assert copies.count == packs + chunks + 1


@pytest.mark.parametrize("chunks", [1, 2])
def test_heads_by_shares_come_back_to_the_rows_whose_queries_they_are(chunks: int) -> None:
    """Over ranks that are threads, of unequal lengths, values wider than keys. Without shares it is
    `models/test_attention.py`'s."""
    numbers, lengths = torch.Generator().manual_seed(3), [5, 4, 2]
    q, k, v = (torch.randn(2, n, 11, w, generator=numbers) for n, w in ((14, 4), (7, 4), (7, 6)))
    want = F.scaled_dot_product_attention(q, k, v, enable_gqa=True).split(lengths, 2)
    wire = Wire(3, lambda sender, receiver, run: run)

    def kernel(qkv: QKV, heads: int, mask: torch.Tensor | None) -> torch.Tensor:
        return F.scaled_dot_product_attention(*qkv, enable_gqa=True)

    def attended(rank: int) -> torch.Tensor:
        axis = Threads(3, rank, wire)
        sequence = SequenceParallelAttention(ulysses=axis, chunks=lambda _: chunks, shares=((), (4, 2, 1)))
        mine = [each.split(lengths, 2)[rank] for each in (q, k, v)]
        return sequence.attend(kernel, mine, query_lengths=lengths, key_lengths=lengths)

    with ThreadPoolExecutor(3) as ranks:
        for found, expected in zip(ranks.map(attended, range(3)), want, strict=True):
            torch.testing.assert_close(found, expected)
