"""What of the exchange between ranks hides behind attention: heads that are sent in chunks, and hops of a ring.

Both are one pipeline. A piece (a chunk of heads, or the keys of one rank of a ring) must arrive before a rank attends
to it, the next one travels meanwhile, and a chunk's output goes back while the next chunk is attended to. The link
carries one transfer after another, in the order in which the rank starts them.

Owns that model, and the choice of the number of chunks. Ranks choose by it (attention.py), and cost models add up by
it; of what it hides they grant a device a part (`HIDDEN`, planner/hardware.py). Pure: every rank that is given the same
numbers chooses alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..exchange_groups import OverlapRates as OverlapRates  # for all callers of this module

FEWER = 2  # times as much must be sent as heads, for all ranks to get all keys instead
MOST_CHUNKS = 10
# A further chunk has a kernel of its own, whose last blocks of queries leave a device partly idle: this part of the
# time in which it attends to as many blocks of queries as it has multiprocessors.
IDLE, QUERY_ROWS, MULTIPROCESSORS = 0.25, 128, 128
LAUNCH_S = 50e-6  # the host's time to start a further chunk: two exchanges, a kernel, a copy
# For fewer numbers of q than this ComfyUI leaves the choice of a kernel to torch, and FlashAttention cuts the keys of
# few heads of few queries: a chunk on the other side of it than all heads at once may have other bits.
FEW_NUMBERS = 128 * 1024
# What chunks must save, as a part of the attention with its exchange. Below it they are not worth their launches.
WORTHWHILE = 0.03


@dataclass(frozen=True, kw_only=True)
class SharedHeads:
    """One attention call whose heads `ranks` share out, on the rank that has the most of it.

    `groups`: heads of keys, of all ranks; `keys`: tokens that each query sees; `head_dim`: the size of a head of keys;
    `flops`: of one rank's attention; `arriving_bytes`: of q, k and v that a rank sends to the others, `returning_bytes`
    of the output that it sends back.
    """

    groups: int
    ranks: int
    keys: int
    head_dim: int
    flops: float
    arriving_bytes: float
    returning_bytes: float


def finished_s(arriving: Sequence[float], attending: Sequence[float], returning: Sequence[float]) -> float:
    """Seconds from the start of the first transfer until all outputs are where they belong.

    Of each piece: the seconds its transfer takes, those of the attention to it, and those of its output's way back.
    """
    link = arrived = arriving[0]
    device = 0.0
    for piece, attend_s in enumerate(attending):
        begins = max(device, arrived)
        if piece + 1 < len(arriving):
            arrived = link = max(link, begins) + arriving[piece + 1]
        if piece:
            link = max(link, begins) + returning[piece - 1]
        device = begins + attend_s
    return max(link, device) + returning[-1]


def ring_s(*, attend_s: float, hop_s: float, ring: int) -> float:
    """Seconds of attention to the keys of `ring` ranks, of `attend_s` seconds in all, whose hops take `hop_s` each."""
    return finished_s((0.0,) + (hop_s,) * (ring - 1), (attend_s / ring,) * ring, (0.0,) * ring)


def chunked_s(*, attend_s: float, arriving_s: float, returning_s: float, latency_s: float, chunks: int) -> float:
    """Seconds of attention of `attend_s` seconds, whose heads arrive and go back in so many chunks.

    `arriving_s`, `returning_s`: of all chunks' transfers, without the latency that each transfer has.
    """
    there, back = arriving_s / chunks + latency_s, returning_s / chunks + latency_s
    return finished_s((there,) * chunks, (attend_s / chunks,) * chunks, (back,) * chunks)


def possible_chunks(groups: int, ranks: int, most_chunks: int = 0) -> list[int]:
    """Numbers of chunks in which each rank has heads of its own, fewest first; `most_chunks` as in `OverlapRates`.

    Where the heads come out even over the ranks, so they do in each chunk: one copy packs each tensor then.
    """
    most = min(most_chunks or MOST_CHUNKS, groups // ranks)
    return [each for each in range(1, most + 1) if groups % ranks or not groups // ranks % each] or [1]


def choose_chunks(shared: SharedHeads, rates: OverlapRates) -> int:
    """Into how many chunks the heads of an attention are sent; 1 where more do not pay."""
    attend_s = shared.flops / rates.attention_flops
    wave_flops = 4.0 * QUERY_ROWS * MULTIPROCESSORS * shared.keys * shared.head_dim
    idle_s = IDLE * wave_flops / rates.attention_flops
    seconds = {
        chunks: (chunks - 1) * (idle_s + LAUNCH_S)
        + chunked_s(
            attend_s=attend_s,
            arriving_s=shared.arriving_bytes / rates.bandwidth,
            returning_s=shared.returning_bytes / rates.bandwidth,
            latency_s=rates.latency_s,
            chunks=chunks,
        )
        for chunks in possible_chunks(shared.groups, shared.ranks, rates.most_chunks)
        if _are_alike(shared, chunks)
    }
    best = min(seconds, key=lambda chunks: seconds[chunks])
    return best if seconds[best] <= (1 - WORTHWHILE) * seconds[1] else 1


def _are_alike(shared: SharedHeads, chunks: int) -> bool:
    """Whether the smallest of so many chunks has as many numbers of q as `FEW_NUMBERS` asks, or no rank has them.

    Numbers of q are told by the FLOPs, as if values were as wide as keys.
    """
    of_a_group = shared.flops / (4 * shared.keys) * shared.ranks / shared.groups
    smallest, most = shared.groups // shared.ranks // chunks, -(-shared.groups // shared.ranks)
    return chunks == 1 or smallest * of_a_group >= FEW_NUMBERS or most * of_a_group < FEW_NUMBERS
