"""What a plan sends, by formula: collectives and bytes of one step of one rank, before anything runs.

Letters: `B` batch, `s` tokens of this rank, `T` tokens of its ulysses group, `H` heads, `D` head size, `U` ulysses and
`R` ring degree, `N` their product, `e` bytes an element. Per block, a rank sends

    ulysses   3 B s H D e (U - 1) / U   queries, keys and values of the heads it gives away, packed in one all-to-all
              B (T - s) (H / U) D e     the way back
    ring      2 B T' (H / U) D e        a hop, R - 1 hops; T' are the tokens it holds before that hop
    either    2 B s H D e (N - 1)       in one all-to-all, where `gathers` says so

A stage of a pipeline sends that for its own blocks, chunk by chunk and never gathering, and beside it

    hidden    B s H D e                 a chunk and conditioning, to the next stage
    latent    4 B s' C                  a chunk, from the last stage to the first; s' are its rows of C channels

Sources: DeepSpeed-Ulysses (arXiv 2309.14509, section 3.2) and Ring Attention (arXiv 2310.01889, section 3), written for
uneven lengths; PipeFusion (arXiv 2405.14430, section 4).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..plan import BatchSlice
from .shard import GATHER_BYTES, NEVER, gathers


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """What the formula needs to know of a model: its blocks and the size of their heads."""

    blocks: int
    heads: int
    head_dim: int
    element_bytes: int
    batch: int


def predict(
    shape: AttentionShape, *, lengths: tuple[int, ...], ring: int, ulysses: int, limit: int = GATHER_BYTES
) -> list[tuple[int, int]]:
    """(collectives, bytes sent) a step for every rank, in part order. `lengths` are the tokens of every part.

    `limit` is that of `gathers`.
    """
    others, row = len(lengths) - 1, _row_bytes(shape)
    if others and gathers(sum(lengths), row_bytes=row, limit=limit):
        return [(shape.blocks, shape.blocks * 2 * mine * row * others) for mine in lengths]
    calls = shape.blocks * (2 * (ulysses > 1) + ring - 1)
    return [
        (calls, shape.blocks * _bytes_a_block(row // ulysses, index, lengths=lengths, ring=ring, ulysses=ulysses))
        for index in range(len(lengths))
    ]


def predict_groups(
    shape: AttentionShape,
    batch_groups: Sequence[Sequence[BatchSlice]],
    *,
    lengths: Sequence[tuple[int, ...]],
    ring: int,
    ulysses: int,
) -> list[tuple[int, int]]:
    """As `predict`, for every rank of every batch group, batch group by batch group. Batch groups send nothing to each
    other.

    `batch_groups` are the pieces of each; `lengths` those of every part by call; the batch is a piece's rows.
    """
    ranks: list[tuple[int, int]] = []
    for pieces in batch_groups:
        runs = [
            predict(replace(shape, batch=stop - start), lengths=lengths[call], ring=ring, ulysses=ulysses)
            for call, start, stop in pieces
        ]
        ranks += [
            (sum(run[part][0] for run in runs), sum(run[part][1] for run in runs)) for part in range(ring * ulysses)
        ]
    return ranks


def predict_stage(
    shape: AttentionShape,
    chunks: Sequence[tuple[int, ...]],
    *,
    part: int,
    ring: int,
    ulysses: int,
    latents: Sequence[int] | None = None,
) -> tuple[int, int]:
    """(messages and collectives, bytes sent) of a rank of one stage, whose number of blocks is that of `shape`.

    `chunks` has every part's tokens of each chunk and conditioning that goes through; `latents`, for the last stage,
    the bytes that it sends back, message by message. What is empty is not sent.
    """
    inside = [predict(shape, lengths=lengths, ring=ring, ulysses=ulysses, limit=NEVER)[part] for lengths in chunks]
    token_bytes = shape.batch * shape.heads * shape.head_dim * shape.element_bytes
    sent = [lengths[part] * token_bytes for lengths in chunks] if latents is None else latents
    messages = [num_bytes for num_bytes in sent if num_bytes]
    return sum(calls for calls, _ in inside) + len(messages), sum(num for _, num in inside) + sum(messages)


def _bytes_a_block(row: int, index: int, *, lengths: tuple[int, ...], ring: int, ulysses: int) -> int:
    """Of heads exchanged and hops; `row` are a token's keys of H / U heads."""
    groups = [sum(lengths[start : start + ulysses]) for start in range(0, len(lengths), ulysses)]
    mine, group = lengths[index], index // ulysses
    there = 3 * mine * (ulysses - 1) * row
    back = (groups[group] - mine) * row
    held = [groups[(group - hop) % ring] for hop in range(ring - 1)]
    return there + back + sum(2 * tokens * row for tokens in held)


def _row_bytes(shape: AttentionShape) -> int:
    return shape.batch * shape.heads * shape.head_dim * shape.element_bytes
