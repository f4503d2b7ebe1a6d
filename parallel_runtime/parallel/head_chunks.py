"""Heads on their way to the ranks that attend with them, in one chunk or several, and their outputs on the way back.

Letters: `B` batch, `S` tokens of this rank, `D` size of a head, `U` ranks. A chunk is a run of consecutive heads, of
which each rank gets a run; so outputs of all chunks laid side by side are in the order of the heads.

Owns how heads are cut into chunks and how messages are laid out: all chunks are packed at once, by one copy a tensor
where heads come out even, two where not, however many ranks and chunks there are. Does not own how many chunks there
are (overlap.py) nor when each is sent (attention.py).
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import chain, groupby
from typing import TypeVar

import torch

from .collectives import AllToAll, Axis
from .shard import split_lengths

Begun = TypeVar("Begun")


@lru_cache(maxsize=1024)  # a step asks for the same ones again and again
def cut_groups(groups: int, ranks: int, chunks: int, shares: tuple[int, ...] = ()) -> tuple[tuple[int, ...], ...]:
    """How many of `groups` each rank gets of each chunk. No rank has more than one more than another, in all; with
    `shares` each has its part of all, of at least one."""
    if shares:
        of_ranks = [split_lengths(each, chunks) for each in split_lengths(groups, ranks, shares, least=1)]
        return tuple(zip(*of_ranks, strict=True))
    base, more = divmod(groups, ranks * chunks)
    counts = [base + (part < more) for part in range(ranks * chunks)]
    return tuple(tuple(counts[first : first + ranks]) for first in range(0, len(counts), ranks))


class HeadsOut:
    """Tensors (B, all heads, S, D) of the same tokens, sent chunk by chunk; each may have heads and sizes of its own.

    `cut` has the groups of heads of each rank in each chunk, `lengths` the S of every rank.
    """

    def __init__(
        self,
        axis: Axis,
        tensors: Sequence[torch.Tensor],
        *,
        cut: tuple[tuple[int, ...], ...],
        groups: int,
        lengths: Sequence[int],
    ) -> None:
        self._axis, self._cut, self._lengths = axis, cut, lengths
        self._batch = tensors[0].shape[0]
        # (heads a group, their size) of each tensor
        self._shapes = [(tensor.shape[1] // groups, tensor.shape[3]) for tensor in tensors]
        self._group = self._batch * sum([heads * size for heads, size in self._shapes])  # numbers a token and group
        self._sent = self._pack(tensors)
        self._under_way: AllToAll | None = None

    def start(self, chunk: int) -> None:
        """Begin to send a chunk, which `take` waits for. One at a time may be under way."""
        self._under_way = self._send(chunk, self._axis.start_all_to_all)

    def take(self, chunk: int) -> list[torch.Tensor]:
        """The tensors (B, own heads, all tokens, D) of a chunk, views of one buffer; sent now unless it is under way.

        After the last one, nothing of what was sent is held.
        """
        under_way, self._under_way = self._under_way, None
        received = self._send(chunk, self._axis.all_to_all) if under_way is None else under_way.wait()
        if chunk + 1 == len(self._cut):
            self._sent = []
        count = self._cut[chunk][self._axis.index]
        tokens = sum(self._lengths)
        parts = received.view(tokens, count * self._group).split_with_sizes(self._widths(count), 1)
        return [
            part.view(tokens, self._batch, count * heads, size).permute(1, 2, 0, 3)
            for part, (heads, size) in zip(parts, self._shapes, strict=True)
        ]

    def _send(self, chunk: int, exchange: Callable[..., Begun]) -> Begun:
        counts, mine = self._cut[chunk], self._axis.index
        tokens = self._lengths[mine]
        return exchange(
            self._sent[chunk],
            send_lengths=tuple(tokens * count * self._group for count in counts),
            receive_lengths=tuple(length * counts[mine] * self._group for length in self._lengths),
        )

    def _widths(self, count: int) -> list[int]:
        """Numbers a token of each tensor, in a share of so many groups."""
        return [self._batch * count * heads * size for heads, size in self._shapes]

    def _pack(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The messages of all chunks, one behind the other: part after part (U in each), tokens outermost in each,
        so that what arrives lies as one tensor."""
        tokens, batch = tensors[0].shape[2], self._batch
        numbers = [sum(each) * tokens * self._group for each in self._cut]
        packed = tensors[0].new_empty(sum(numbers))
        group = start = 0
        for number, groups in _runs(self._cut):
            row = groups * self._group
            room = packed[start : start + number * tokens * row].view(number, tokens, row)
            parts = room.split_with_sizes(self._widths(groups), 2)
            for tensor, part, (heads, size) in zip(tensors, parts, self._shapes, strict=True):
                given = tensor.narrow(1, group * heads, number * groups * heads)
                given = given.view(batch, number, groups * heads, tokens, size).permute(1, 3, 0, 2, 4)
                part.view(number, tokens, batch, groups * heads, size).copy_(given)
            group += number * groups
            start += room.numel()
        return list(packed.split_with_sizes(numbers))


class HeadsBack:
    """Outputs (B, own heads, all tokens, D) of each chunk on their way to the ranks whose tokens they are.

    `cut` has the heads of each rank in each chunk, `lengths` the tokens of every rank.
    """

    def __init__(self, axis: Axis, *, cut: Sequence[tuple[int, ...]], lengths: Sequence[int]) -> None:
        self._axis, self._cut, self._lengths = axis, cut, lengths
        self._under_way: list[AllToAll] = []

    def start(self, chunk: int, out: torch.Tensor) -> None:
        """Begin to send a chunk's output. Chunks come in order."""
        self._under_way.append(self._send(chunk, out, self._axis.start_all_to_all))

    def finish(self, out: torch.Tensor) -> torch.Tensor:
        """Send the last chunk's output, and put all together: (B, all heads, S, D)."""
        batch, _, _, size = out.shape
        received = [each.wait() for each in self._under_way]  # before the last, which may be on another stream
        self._under_way = []
        received.append(self._send(len(self._cut) - 1, out, self._axis.all_to_all))
        tokens = self._lengths[self._axis.index]
        by_token = [
            part.view(tokens, batch, count, size).transpose(0, 1)
            for chunk, counts in zip(received, self._cut, strict=True)
            for part, count in zip(
                chunk.split_with_sizes([tokens * batch * n * size for n in counts]), counts, strict=True
            )
        ]
        # (B, S, all heads, D) in memory, as the model flattens it next
        return torch.cat(by_token, 2).transpose(1, 2)

    def _send(self, chunk: int, out: torch.Tensor, exchange: Callable[..., Begun]) -> Begun:
        batch, count, _, size = out.shape
        tokens = self._lengths[self._axis.index]
        return exchange(
            out.permute(2, 0, 1, 3).contiguous().view(-1),  # tokens outermost
            send_lengths=tuple(length * batch * count * size for length in self._lengths),
            receive_lengths=tuple(tokens * batch * each * size for each in self._cut[chunk]),
        )


@lru_cache(maxsize=1024)
def _runs(cut: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, int], ...]:
    """Equal neighbours together: how many parts, and of how many groups of heads each is."""
    return tuple((len(list(alike)), groups) for groups, alike in groupby(chain.from_iterable(cut)))
