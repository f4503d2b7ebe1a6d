"""What hides behind attention by the model of overlap.py, and the number of chunks that follows from it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel_runtime.parallel.overlap import (
    OverlapRates,
    SharedHeads,
    choose_chunks,
    chunked_s,
    finished_s,
    possible_chunks,
    ring_s,
)

SECONDS = st.floats(0, 10)
MEMORY = 10e9  # bytes a second, of two cards that exchange through host memory


def shared(tokens: int, heads: int, ranks: int, *, head_dim: int = 128) -> SharedHeads:
    """Attention of as many queries as keys, in bf16."""
    sent = 2 * tokens / ranks * heads * head_dim * (ranks - 1) / ranks
    flops = 4.0 * tokens**2 * heads * head_dim / ranks
    return SharedHeads(
        groups=heads,
        ranks=ranks,
        keys=tokens,
        head_dim=head_dim,
        flops=flops,
        arriving_bytes=3 * sent,
        returning_bytes=sent,
    )


@given(st.lists(st.tuples(SECONDS, SECONDS, SECONDS), min_size=1, max_size=8))
def test_nothing_is_quicker_than_the_link_or_the_device_and_nothing_slower_than_both(pieces: list[tuple]) -> None:
    arriving, attending, returning = zip(*pieces, strict=True)
    found = finished_s(arriving, attending, returning)
    link, device = sum(arriving) + sum(returning), sum(attending)
    assert found >= max(link, arriving[0] + device + returning[-1]) - 1e-9
    assert found <= link + device + 1e-9


@pytest.mark.parametrize("number", [1, 2, 5, 10])
def test_of_an_exchange_that_attention_can_hide_the_first_and_last_chunks_show(number: int) -> None:
    found = chunked_s(attend_s=20.0, arriving_s=6.0, returning_s=2.0, latency_s=0.0, chunks=number)
    assert found == pytest.approx(20 + 8 / number)


@pytest.mark.parametrize(("hop_s", "seconds"), [(1.0, 8.0), (2.0, 8.0), (3.0, 3 * 3.0 + 2.0), (0.0, 8.0)])
def test_a_ring_shows_what_its_hops_take_beyond_attention_to_one_ranks_keys(hop_s: float, seconds: float) -> None:
    assert ring_s(attend_s=8.0, hop_s=hop_s, ring=4) == pytest.approx(seconds)


def test_transfers_and_attention_follow_each_other() -> None:
    assert finished_s((2.0,), (3.0,), (4.0,)) == 9
    assert finished_s((1.0, 2.0, 3.0), (4.0, 1.0, 5.0), (1.0, 1.0, 2.0)) == 15  # the device waits for the third
    assert finished_s((1.0, 1.0), (1.0, 1.0), (5.0, 3.0)) == 10  # what goes back waits for the link
    assert chunked_s(attend_s=4.0, arriving_s=2.0, returning_s=1.0, latency_s=0.25, chunks=2) == 6
    assert ring_s(attend_s=6.0, hop_s=2.5, ring=3) == 7


@pytest.mark.parametrize(
    ("tokens", "heads", "ranks", "flops", "latency_s", "found"),
    [
        (4608, 24, 8, 40e12, 1e-5, [1, 1, 3, 3, 1, 1, 1, 1]),
        (1024, 24, 2, 40e12, 1e-5, [1, 1, 1, 2, 1, 1, 1, 1]),
        (1024, 40, 4, 4e12, 2e-4, [2, 2, 2, 1, 1, 1, 1, 1]),
        (32760, 40, 4, 40e12, 1e-5, [5, 10, 5, 5, 2, 1, 1, 1]),
    ],
)
def test_most_chunks_where_the_exchange_takes_as_long_as_attention(
    tokens: int, heads: int, ranks: int, flops: float, latency_s: float, found: list[int]
) -> None:
    """Over links of 1, 2, 4 and so on to 128 GB/s. One that is far slower or quicker is not worth the launches."""
    links = [OverlapRates(attention_flops=flops, bandwidth=2**n * 1e9, latency_s=latency_s) for n in range(8)]
    assert [choose_chunks(shared(tokens, heads, ranks), each) for each in links] == found


def test_no_more_chunks_than_a_figure_of_the_device_allows() -> None:
    for most in (1, 2, 4):
        rates = OverlapRates(attention_flops=140e12, bandwidth=MEMORY, latency_s=40e-6, most_chunks=most)
        assert choose_chunks(shared(32760, 40, 2), rates) == most


def test_no_chunk_has_so_few_numbers_of_q_that_another_kernel_may_attend_than_to_all_heads_at_once() -> None:
    """2 heads of 16 a rank: 131,072 numbers are 8,192 tokens of one head. The link is so slow that chunks pay."""
    rates = OverlapRates(attention_flops=1e9, bandwidth=1.2e5, latency_s=0.0)
    found = {tokens: choose_chunks(shared(tokens, 4, 2, head_dim=16), rates) for tokens in (4095, 4096, 8191, 8192)}
    assert found == {4095: 2, 4096: 1, 8191: 1, 8192: 2}
    for numbers, several in ((64_000, False), (132_000, True), (43_000, True)):  # of a group: a rank has 3 of 5
        uneven = SharedHeads(
            **{"groups": 5, "ranks": 2, "keys": 1024, "head_dim": 4, "flops": 2.5 * numbers * 4 * 1024},
            **{"arriving_bytes": 1.9 * numbers, "returning_bytes": 0.6 * numbers},
        )
        assert (choose_chunks(uneven, rates) > 1) == several, numbers


def test_each_rank_has_heads_of_its_own_in_each_chunk_and_even_ones_where_they_come_out_even() -> None:
    assert possible_chunks(40, 2) == [1, 2, 4, 5, 10]
    assert possible_chunks(24, 8) == [1, 3]
    assert possible_chunks(44, 4) == [1], "no 11"
    assert possible_chunks(30, 4) == [1, 2, 3, 4, 5, 6, 7]
    assert possible_chunks(40, 2, 4) == [1, 2, 4] and possible_chunks(40, 2, 1) == [1], "what a card's figures allow"
    assert possible_chunks(8, 8) == possible_chunks(1, 2) == [1]
