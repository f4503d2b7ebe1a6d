"""What the words of a plan do to values: from whole to this rank's tokens (`cutter`), and back (`gatherer`).

Words become functions once, when a model is shared; a call of the model then only runs them. Streams are cut into runs
whose lengths differ by at most one. Of two streams one has its longer runs on the first ranks, the other on the last.

Owns who has which tokens of a call's streams. Does not own where values come from (hooks.py).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...parallel.shard import split_lengths
from ..plans.words import GRID, Attention, Each, Frames, Grid, Guides, Index, Order, Ranges, Run, Tokens, Word
from .group import TokenGroup
from .lightricks import cut_guides, cut_timestep, is_compressed

Change = Callable[["TokenCall", Any], Any]
Lengths = tuple[tuple[int, ...], tuple[int, ...]]  # queries and keys of each rank in an attention call
Told = dict[tuple, Lengths]


class TokenCall:
    """One call of a shared model: its streams' lengths, what has been cut already, and which attention is under way."""

    def __init__(self, group: TokenGroup, name: str, told: Told | None = None) -> None:
        self.group, self.parts, self.index = group, group.parts, group.index
        self.name = name  # of the model, for messages
        self.control: dict[str, Any] | None = None  # residuals that are whole still
        self.streams: dict[str, tuple[int, ...]] = {}  # stream -> tokens of each rank
        self.grid: tuple[int, int, int] = (0, 0, 0)
        self.indices: list[int] = []  # values that an "index:" word has cut
        self.changed: dict[tuple[int, int], tuple[Any, Any]] = {}  # see hooks.py
        self.attention: Attention | None = None  # of the module that runs; None outside of blocks
        self.lengths_of: dict[int, Lengths] = {}  # by the id of an Attention: to hash one takes longer
        self.tokens = 0  # keys of the largest attention call so far
        self.asked = 0  # attention calls whose lengths the plan leaves open
        self.told: Told = {} if told is None else told  # their lengths, by shape; outlives the call

    def introduce(self, stream: str, total: int) -> tuple[int, ...]:
        """Deal the tokens of a stream that is new. Raises ValueError if some ranks would get none, and others not."""
        if 0 < total < self.parts:
            raise ValueError(
                f"{self.name}: stream {stream!r} has {total} tokens for {self.parts} ranks, and each rank needs one; "
                f"use at most {total} ranks for its tokens"
            )
        lengths = split_lengths(total, self.parts)
        self.streams[stream] = lengths if len(self.streams) % 2 else lengths[::-1]
        return self.streams[stream]

    def start(self, stream: str) -> int:
        """Where this rank's tokens begin in the whole stream."""
        return sum(self.streams[stream][: self.index])

    def lengths(self, streams: Sequence[str]) -> tuple[int, ...]:
        """Tokens of each rank in these streams together."""
        return tuple(map(sum, zip(*(self._tokens(stream) for stream in streams), strict=True)))

    def _tokens(self, stream: str) -> tuple[int, ...]:
        lengths = self.streams[stream]
        if stream != GRID:
            return lengths
        frames, height, width = self.grid
        return tuple(length * frames * min(height, width) for length in lengths)


def cutter(word: Word) -> Change:
    """The function that takes this rank's tokens of a value."""
    if isinstance(word, Each):
        return _each([cutter(part) if part else None for part in word.words])
    if isinstance(word, Ranges):
        return lambda call, value: value if value is None else cut_ranges(call, value, word.runs)
    if isinstance(word, Index):
        return lambda call, value: value if value is None else cut_index(call, value, word.stream)
    if isinstance(word, Order):
        return _tensors(lambda call, mask: in_part_order(call, mask, word.runs))
    if isinstance(word, Grid):
        return _tensors(lambda call, value: cut_grid(call, value, word))
    if isinstance(word, Frames):
        return lambda call, value: cut_frames(call, value, word)
    if isinstance(word, Guides):
        return lambda call, mask: mask if mask is None else cut_guides(mask, call.streams[word.stream], call.index)
    return _tensors(lambda call, value: cut_tokens(call, value, word))


def gatherer(word: Word) -> Change:
    """The function that makes a value whole. Raises ValueError for words that have no way back."""
    if isinstance(word, Each):
        return _each([gatherer(part) if part else None for part in word.words])
    if isinstance(word, Grid) and not word.flat:
        return _tensors(lambda call, value: gather_grid(call, value, word.dim))
    if isinstance(word, Tokens) and not word.rest:
        return _tensors(lambda call, value: gather_tokens(call, value, word))
    raise ValueError(f"{word} cannot be gathered; use streams or 'grid'")


def _each(changes: list[Change | None]) -> Change:
    def change(call: TokenCall, values: Any) -> Any:  # noqa: ANN401
        if values is None:
            return None
        pairs = zip(values, changes, strict=True)
        return type(values)([each(call, value) if each else value for value, each in pairs])

    return change


def _tensors(change: Callable[[TokenCall, Tensor], Tensor]) -> Change:
    """The change of a tensor, for each tensor in a value: tuples and lists as well, anything else as it is."""

    def apply(call: TokenCall, value: Any) -> Any:  # noqa: ANN401
        if isinstance(value, Tensor):
            return change(call, value)
        if isinstance(value, (tuple, list)):
            return type(value)([apply(call, each) for each in value])
        return value

    return apply


def cut_tokens(call: TokenCall, value: Tensor, word: Tokens) -> Tensor:
    """This rank's rows of the streams in `word.dim`, as a tensor of its own: blocks write in place."""
    dim, total = word.dim, value.shape[word.dim]
    if total == 1 and all(run.stream in call.streams for run in word.runs):
        return value  # one row for all tokens
    pieces, at = [], 0
    for run in word.runs:
        lengths = call.streams.get(run.stream) or call.introduce(run.stream, total)
        start = at if run.held else at + sum(lengths[: call.index])
        pieces.append(value.narrow(dim, start, lengths[call.index]))
        at += lengths[call.index] if run.held else sum(lengths)
    if word.rest:
        pieces.append(value.narrow(dim, at, total - at))
    elif at != total:
        raise ValueError(_other_length(call, word.runs, at, total))
    return torch.cat(pieces, dim) if len(pieces) > 1 else pieces[0].clone(memory_format=torch.contiguous_format)


def cut_frames(call: TokenCall, value: Any, word: Frames) -> Any:  # noqa: ANN401
    """(B, frames or tokens or 1, ...) to this rank's rows, one for each token. Frames that lack tokens are the last."""
    start = call.start(word.stream)
    end = start + call.streams[word.stream][call.index]
    if is_compressed(value):
        return cut_timestep(value, start, end)
    if value is None or (word.ndim is not None and value.ndim != word.ndim):
        return value
    frames, tokens = value.shape[1], sum(call.streams[word.stream])
    if frames == 1:
        return value
    if frames == tokens:
        return value[:, start:end].contiguous()
    each = -(-tokens // frames)
    return value.index_select(1, torch.arange(start, end, device=value.device) // each)


def cut_grid(call: TokenCall, value: Tensor, word: Grid) -> Tensor:
    """This rank's rows or columns of a picture, or of each frame."""
    dim, flat = word.dim, word.flat
    if GRID not in call.streams:
        frames, height, width = value.shape[dim : dim + 3]
        call.grid = (frames, height, width)
        call.introduce(GRID, max(height, width))
    axis = _longer_side(call)
    start, length = call.start(GRID), call.streams[GRID][call.index]
    if flat:
        cut = value.unflatten(dim, call.grid).narrow(dim + axis, start, length)
        return cut.flatten(dim, dim + 2).contiguous()
    if value.shape[dim + axis] == 1:
        return value
    return value.narrow(dim + axis, start, length).clone(memory_format=torch.contiguous_format)


def in_part_order(call: TokenCall, mask: Tensor, runs: Sequence[Run]) -> Tensor:
    """A mask (..., queries or 1, keys or 1) over whole tokens, in the order in which the ranks hold them."""
    rows: list[Tensor] = []
    for part in range(call.parts):
        first = 0
        for run in runs:
            lengths = call.streams[run.stream]
            start = first + sum(lengths[:part])
            rows.append(torch.arange(start, start + lengths[part], device=mask.device))
            first += sum(lengths)
    order = torch.cat(rows)
    for dim in (-1, -2):
        if mask.shape[dim] == len(order):
            mask = mask.index_select(dim, order)
        elif mask.shape[dim] != 1:
            raise ValueError(_other_length(call, runs, len(order), mask.shape[dim]))
    return mask


def cut_ranges(call: TokenCall, ranges: Sequence[tuple], runs: Sequence[Run]) -> list[tuple]:
    """Ranges (start, end, ...) of tokens, end None for the last, as ranges of this rank's tokens."""
    found = []
    for start, end, *rest in ranges:
        whole = mine = 0  # tokens before this run: of all there are in the value, of this rank
        for run in runs:
            lengths = call.streams[run.stream]
            here = lengths[call.index]
            first = whole + (0 if run.held else sum(lengths[: call.index]))
            low = min(max(start - first, 0), here)
            high = here if end is None else min(max(end - first, 0), here)
            if low < high:
                found.append((mine + low, mine + high, *rest))
            whole += here if run.held else sum(lengths)
            mine += here
    return found


def cut_index(call: TokenCall, value: int, stream: str) -> int:
    """How many of the first `value` tokens of a stream are this rank's."""
    call.indices.append(value)
    return min(max(value - call.start(stream), 0), call.streams[stream][call.index])


def cut_control(call: TokenCall, residuals: Sequence[Tensor | None], stream: str) -> list[Tensor | None]:
    """This rank's rows of a ControlNet's residuals (B, S, C); a shorter one is for the first tokens of the stream."""
    start = call.start(stream)
    end = start + call.streams[stream][call.index]
    return [None if each is None else each[:, start:end] for each in residuals]


def gather_tokens(call: TokenCall, value: Tensor, word: Tokens) -> Tensor:
    """All rows of the streams in `word.dim`; of those that are held, this rank's."""
    pieces, at = [], 0
    for run in word.runs:
        lengths = call.streams[run.stream]
        piece = value.narrow(word.dim, at, lengths[call.index])
        is_whole = run.held or not sum(lengths)
        pieces.append(piece if is_whole else call.group.gather(piece, dim=word.dim, lengths=lengths))
        at += lengths[call.index]
    if at != value.shape[word.dim]:
        raise ValueError(_other_length(call, word.runs, at, value.shape[word.dim]))
    return torch.cat(pieces, word.dim) if len(pieces) > 1 else pieces[0]


def gather_grid(call: TokenCall, value: Tensor, dim: int) -> Tensor:
    """All rows or columns."""
    return call.group.gather(value, dim=dim + _longer_side(call), lengths=call.streams[GRID])


def _longer_side(call: TokenCall) -> int:
    _, height, width = call.grid
    return 1 if height >= width else 2


def _other_length(call: TokenCall, runs: Sequence[Run], planned: int, found: int) -> str:
    names = "+".join(run.stream for run in runs)
    return (
        f"{call.name}: {names} has {planned} tokens by the plan and {found} in this call; "
        "use a ComfyUI that the plan was made for"
    )
