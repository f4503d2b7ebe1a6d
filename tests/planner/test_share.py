"""The bound of a step: one rank's share, and what shows of its exchange over a link."""

from dataclasses import replace

import pytest
import torch

from benchmarks.share.attended import Attended
from benchmarks.share.bound import bound_s, exchange_s, link_named, shown_s
from benchmarks.share.exchange import Delivery, at_most, local_sequence
from benchmarks.share.rank import Share
from parallel_runtime.parallel.overlap import SharedHeads
from parallel_runtime.planner.hardware import Interconnect

CPU = torch.device("cpu")
LINK = Interconnect(name="slow", bandwidth=1e9, latency_s=1e-3)
FREE = Interconnect(name="free", bandwidth=1e18, latency_s=0.0)
HEADS = SharedHeads(groups=24, ranks=2, keys=4096, head_dim=128, flops=1e12, arriving_bytes=30e6, returning_bytes=10e6)
SHARE = Share(
    ranks=2,
    ring=1,
    blocks=1,
    tokens=4096,
    device_s=0.5,
    host_s=0.2,
    clock_s=0.5,
    block=(0.4, 0.1),
    num_bytes=41_000_000,
    messages=3,
    asynchronous=True,
    attended=(Attended(HEADS, 0.3),),
)


def test_over_a_link_that_takes_no_time_the_bound_is_the_longer_of_device_and_host() -> None:
    assert bound_s(SHARE, FREE) == pytest.approx(0.5)
    assert bound_s(replace(SHARE, host_s=0.7), FREE) == pytest.approx(0.7)
    assert bound_s(replace(SHARE, host_s=0.7, asynchronous=False), FREE) == pytest.approx(0.5)  # the host's is in it


def test_a_gather_shows_whole_and_of_attention_what_heads_in_chunks_cannot_hide() -> None:
    gather = 1e-3 + 1e-3  # its bytes over the link, its latency
    chunks = SHARE.attended[0].chunks(LINK)
    assert chunks > 1
    assert shown_s(SHARE, LINK) < 0.5 * exchange_s(SHARE, LINK)
    whole = Attended(HEADS, 0.3).shown_s(LINK, chunks=1)
    assert whole == pytest.approx(0.04 + 2 * 1e-3)  # nothing hides in one chunk
    alone = replace(SHARE, attended=(), num_bytes=1_000_000, messages=1)
    assert shown_s(alone, LINK) == pytest.approx(gather)
    assert shown_s(SHARE, LINK) == pytest.approx(gather + SHARE.attended[0].shown_s(LINK))
    assert shown_s(replace(SHARE, asynchronous=False), LINK) == exchange_s(SHARE, LINK)  # a CPU copies by itself


def test_a_deeper_model_has_more_of_what_blocks_take_and_as_much_of_the_rest() -> None:
    deep = SHARE.at_depth(11)
    assert (deep.device_s, deep.host_s) == (pytest.approx(4.5), pytest.approx(1.2))
    assert shown_s(deep, LINK) == pytest.approx(11 * shown_s(SHARE, LINK))


@pytest.mark.parametrize("text", ["0", "-1", "wire", "nan"])
def test_a_link_that_there_is_not_is_refused(text) -> None:
    with pytest.raises(ValueError, match=r"nvlink4|link 'wire' is unknown"):
        link_named(text)


def test_a_ranks_exchange_is_as_long_as_with_others_and_its_bytes_are_those_that_leave_it() -> None:
    """5 heads on 2 ranks, 4 and 3 tokens: the first gets 3 heads of 7 tokens, and sends 2 heads of its 4."""
    sequence = local_sequence(ulysses=2, device=CPU)
    seen = []

    def kernel(qkv, heads, mask):
        q, k, v = qkv
        qkv.clear()
        seen.append((tuple(q.shape), heads))
        return q + 0 * (k + v)

    q = torch.randn(1, 5, 4, 8)
    given = [q.clone() for _ in range(3)]
    out = sequence.attend(kernel, given, query_lengths=(4, 3), key_lengths=(4, 3))
    assert seen == [((1, 3, 7, 8), 3)]
    assert out.shape == q.shape
    assert torch.equal(out[:, :3], q[:, :3])  # its own tokens and heads went nowhere
    assert sequence.ulysses.traffic.num_bytes == 4 * (3 * 4 * 2 * 8 + 3 * 3 * 8)  # q, k, v there; its heads of 3 back


def test_a_message_takes_as_long_as_its_link_says() -> None:
    all_to_all = Interconnect(name="shared", bandwidth=1e9, latency_s=1e-3, contention=1.0)
    delivery = Delivery(CPU, all_to_all, ranks=4)
    assert delivery.seconds(1_000_000, to_all=True) == pytest.approx(3e-3)
    assert delivery.seconds(1_000_000, to_all=False) == pytest.approx(2e-3)
    assert Delivery(CPU).seconds(1_000_000, to_all=True) == 0.0


def test_heads_go_in_as_many_chunks_as_come_out_even_and_no_more_than_asked() -> None:
    assert [at_most(HEADS, chunks) for chunks in (1, 2, 5, 8)] == [1, 2, 4, 6]  # 12 heads a rank
