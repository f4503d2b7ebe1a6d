"""One call of a shared model: which rank has which tokens of its streams.

Streams are cut into runs whose lengths differ by at most one, or are in proportion to the ranks' shares, each of at
least one token. Of two streams one has its longer runs on the first ranks, the other on the last. A stream of fewer
tokens than ranks is not cut, since ComfyUI's modules fail on a tensor without tokens; nor is one that its spec says
every rank has. Every rank computes all of such a stream, and its keys count once, on the first rank. Keys that a class
kept of a call before are on every rank, and none sends them.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...parallel.attention import QKV, AttentionFunction, SequenceParallelAttention
from ...parallel.shard import split_lengths
from ..specs.words import FIRST, GRID, KEPT, UNPLANNED, Attention
from .first_keys import FirstKeys

Lengths = tuple[tuple[int, ...], tuple[int, ...]]  # queries and keys of each rank in an attention call


class TokenCall:
    """One call of a shared model: its streams' lengths, what has been cut already, and which attention is under way."""

    def __init__(self, group: SequenceParallelAttention, name: str) -> None:
        self.group, self.parts, self.index = group, group.parts, group.index
        self.name = name  # of the model, for messages
        self.control: dict[str, Any] | None = None  # residuals that are whole still
        self.streams: dict[str, tuple[int, ...]] = {}  # stream -> tokens of each rank
        self.uncut: set[str] = set()  # streams of which every rank has all tokens
        self.grid: tuple[int, ...] = ()  # frames, height, width
        self.ranges: dict[Hashable, Hashable] = {}  # whole, by their streams; a rank may have the same of two calls
        self.changed: dict[int, tuple[Any, Any]] = {}  # by an argument's key, what it was last and became (hooks.py)
        self.attention: Attention | None = None  # of the block that runs; None outside of blocks
        self.inside: Mapping[str, Attention] = {}  # of modules in it, by their names (sites.py)
        # by the id of an Attention: to hash one takes longer
        self.lengths_of: dict[int, tuple[Lengths, tuple[int, int]]] = {}
        self.first_keys: FirstKeys | None = None  # of the block that runs, if its word is "again"

    def introduce(self, stream: str, total: int) -> tuple[int, ...]:
        """Cut a new stream of `total` tokens: how many each rank has."""
        if 0 < total < self.parts:
            self.uncut.add(stream)
            lengths = (total,) * self.parts
        else:
            from_last = len(self.streams) % 2 == 0
            lengths = split_lengths(total, self.parts, self.group.shares, from_last=from_last, least=min(total, 1))
        self.streams[stream] = lengths
        return lengths

    def introduce_whole(self, stream: str, total: int) -> int:
        """A stream of which every rank has all tokens, and has `total` from here on; returns how many."""
        self.uncut.add(stream)
        lengths = (total,) * self.parts
        if self.streams.get(stream, lengths) != lengths:
            self.lengths_of.clear()
        self.streams[stream] = lengths
        return total

    def introduce_first(self, stream: str, total: int) -> tuple[int, ...]:
        """The first `total` tokens of a stream, as a stream of their own: each rank has those that it has already."""
        name, lengths, uncut = f"{FIRST}{stream}", self.streams[stream], stream in self.uncut
        starts = [0 if uncut else sum(lengths[:part]) for part in range(self.parts)]
        found = tuple(min(max(total - start, 0), each) for start, each in zip(starts, lengths, strict=True))
        if self.streams.get(name) != found:
            self.lengths_of.clear()
        self.streams[name] = found
        self.uncut |= {name} if uncut else set()
        return found

    def start(self, stream: str) -> int:
        """Where this rank's tokens begin in the whole stream."""
        return 0 if stream in self.uncut else sum(self.streams[stream][: self.index])

    def total(self, stream: str) -> int:
        """Tokens of the whole stream."""
        lengths = self.streams[stream]
        return lengths[0] if stream in self.uncut else sum(lengths)

    def frame_lengths(self, tokens: int) -> tuple[int, ...]:
        """Tokens of each rank in as many frames of the grid as these of this rank are. Raises ValueError for parts."""
        rows, shorter = self.streams[GRID], min(self.grid[1:])
        frames, more = divmod(tokens, rows[self.index] * shorter)
        if more:
            raise ValueError(
                f"{self.name}: attention over {tokens} tokens of this rank is not over whole frames, of which it has "
                f"{rows[self.index] * shorter} each; use a ComfyUI that the plan was made for"
            )
        return tuple(frames * each * shorter for each in rows)

    def lengths(self, streams: Sequence[str]) -> tuple[int, ...]:
        """Tokens of each rank in these streams together."""
        return tuple(map(sum, zip(*(self._tokens(stream) for stream in streams), strict=True)))

    def key_lengths(self, streams: Sequence[str]) -> tuple[int, ...]:
        """The same, those of a stream that is not cut on the first rank alone, and none of those that were kept."""
        streams = [stream for stream in streams if not stream.startswith(KEPT)]
        first, *others = self.lengths(streams)
        uncut = sum(self._tokens(stream)[0] for stream in streams if stream in self.uncut)
        return first, *(each - uncut for each in others)

    def attended(self, attention: Attention) -> tuple[Lengths, tuple[int, int]]:
        """Queries and keys of each rank by the spec; and how many of both this rank has, keys that do not count too."""
        known = self.lengths_of.get(id(attention))
        if known is None:
            queries, held = self.lengths(attention.queries), self.lengths(attention.keys)
            lengths = queries, self.key_lengths(attention.keys)
            known = self.lengths_of[id(attention)] = lengths, (queries[self.index], held[self.index])
        return known

    def chosen(self, attention: Attention, found: tuple[int, int]) -> Attention:
        """Of alternatives the first in which this rank has so many queries and keys; the last where there is none.

        Keys of the alternative "local" are among the tokens that every rank has; the first stands for more of them.
        """
        first = attention
        while attention.otherwise is not None and not self._fits(attention, found):
            attention = attention.otherwise
        if attention.local and found[1] > sum(self.total(stream) for stream in self.uncut if ":" not in stream):
            return first
        return attention

    def _fits(self, attention: Attention, found: tuple[int, int]) -> bool:
        """Whether this rank has so many queries and keys by the spec. Of a stream whose keys were kept they say how
        many there are; a call that has tokens of that stream computes their keys."""
        kept = next((stream for stream in attention.keys if stream.startswith(KEPT)), None)
        others = {*attention.queries, *attention.keys} - {kept}
        if not others <= self.streams.keys():
            return False
        if kept is not None:
            if any(self.streams.get(kept.removeprefix(KEPT), ())):
                return False
            more = found[1] - sum(self._tokens(stream)[self.index] for stream in attention.keys if stream != kept)
            if more <= 0:
                return False
            self.introduce_whole(kept, more)
        return self.attended(attention)[1] == found

    def common_keys(self, attention: Attention, *, masked: bool) -> int:
        """How many of the keys were kept of a call before: they come first, and every rank has them.

        Raises ValueError where there are some and the attention is `masked`.
        """
        first = attention.keys[0] if attention.keys else ""
        if not first.startswith(KEPT):
            return 0
        if masked:
            raise ValueError(f"{self.name}: a mask over keys that were kept; use a ComfyUI that the plan was made for")
        return self.streams[first][self.index]

    def has_all_keys(self, attention: Attention) -> bool:
        """Whether every rank has all keys of this attention."""
        return attention is not UNPLANNED and self.uncut.issuperset(attention.keys)

    def counted(self, streams: Sequence[str], tensor: Tensor, dim: int) -> Tensor:
        """Of a tensor with this rank's tokens of these streams in `dim`, those that count on this rank, and those that
        were kept."""
        elsewhere = {stream for stream in self.uncut.intersection(streams) if not stream.startswith(KEPT)}
        if not self.index or not elsewhere:
            return tensor
        pieces = tensor.split([self._tokens(stream)[self.index] for stream in streams], dim)
        return torch.cat([each for stream, each in zip(streams, pieces, strict=True) if stream not in elsewhere], dim)

    def of_chunk(self, lengths: Sequence[int]) -> Sequence[int]:
        """Of a number for each part those of the ranks that run now: of all, where a call is one pass."""
        return lengths

    def attend(
        self,
        kernel: AttentionFunction,
        qkv: QKV,
        attention: Attention,
        *,
        query_lengths: Sequence[int],
        key_lengths: Sequence[int],
        mask: Tensor | None,
        **how: Any,  # noqa: ANN401
    ) -> Tensor:
        """As `SequenceParallelAttention.attend`, which `how` is given to; the lengths are those of each part."""
        return self.group.attend(kernel, qkv, query_lengths=query_lengths, key_lengths=key_lengths, mask=mask, **how)

    def gather(self, stream: str, tensor: Tensor, *, dim: int) -> Tensor:
        """Everybody's rows of a stream, whole along `dim`; contiguous, since modules take views of what they made."""
        return self.group.gather(tensor, dim=dim, lengths=self.streams[stream]).contiguous()

    def gather_keys(self, attention: Attention, tensor: Tensor, *, dim: int, lengths: Sequence[int]) -> Tensor:
        """As `gather`, what has a row for each key of an attention, in the order of the parts."""
        return self.group.gather(tensor, dim=dim, lengths=lengths)

    def gather_rows(self, tensor: Tensor, *, dim: int, lengths: Sequence[int]) -> Tensor:
        """As `gather`, rows of the parts that `of_chunk` has."""
        return self.group.gather(tensor, dim=dim, lengths=self.of_chunk(lengths))

    def _tokens(self, stream: str) -> tuple[int, ...]:
        lengths = self.streams[stream]
        if stream != GRID:
            return lengths
        frames, height, width = self.grid
        return tuple(length * frames * min(height, width) for length in lengths)
