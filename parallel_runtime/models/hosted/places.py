"""What the words of a spec do to places: of rows and columns of pictures, of masks, and of ranges of tokens.

Does not own what becomes of values with a row a token (cuts.py), nor which rank has which tokens (call.py).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..specs.words import GRID, Grid, StreamTokens
from .call import TokenCall
from .cuts import other_length


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
        cut = value.unflatten(dim, (-1, *call.grid[1:])).narrow(dim + axis, start, length)
        return cut.flatten(dim, dim + 2).contiguous()
    if value.shape[dim + axis] == 1:
        return value
    return value.narrow(dim + axis, start, length).clone(memory_format=torch.contiguous_format)


def in_part_order(call: TokenCall, mask: Tensor, runs: Sequence[StreamTokens]) -> Tensor:
    """A mask (..., queries or 1, keys or 1) over whole tokens, in the order in which the ranks hold them."""
    if all(run.stream in call.uncut for run in runs):
        return mask
    total = sum(call.total(run.stream) for run in runs)
    for dim, uncut_on in ((-1, 1), (-2, call.parts)):
        if mask.shape[dim] == total:
            order = [rows_of(call, runs, part, with_uncut=part < uncut_on) for part in range(call.parts)]
            mask = mask.index_select(dim, torch.cat(order).to(mask.device))
        elif mask.shape[dim] != 1:
            raise ValueError(other_length(call, runs, total, mask.shape[dim]))
    return mask


def rows_of(call: TokenCall, runs: Sequence[StreamTokens], part: int, *, with_uncut: bool) -> Tensor:
    """Where the tokens of one rank lie among all tokens of these runs."""
    rows, first = [], 0
    for run in runs:
        mine, total = _tokens_of(call, run.stream, part)
        if run.stream not in call.uncut or with_uncut:
            rows.append(first + mine)
        first += total
    return torch.cat(rows) if rows else torch.arange(0)


def _tokens_of(call: TokenCall, stream: str, part: int) -> tuple[Tensor, int]:
    """One rank's tokens of a stream, by their places in it, and how many it has."""
    lengths = call.streams[stream]
    start = 0 if stream in call.uncut else sum(lengths[:part])
    if stream != GRID:
        return torch.arange(start, start + lengths[part]), call.total(stream)
    tokens = torch.arange(math.prod(call.grid)).view(call.grid)
    return tokens.narrow(_longer_side(call), start, lengths[part]).flatten(), tokens.numel()


def cut_ranges(call: TokenCall, ranges: Sequence[tuple], runs: Sequence[StreamTokens]) -> list[tuple]:
    """Ranges (start, end, ...) of tokens, end None for the last, as ranges of this rank's tokens.

    A tensor in a range has a row for each of its tokens, and is cut with it.
    """
    found = []
    told = tuple(tuple(each for each in one if not isinstance(each, Tensor)) for one in ranges)
    call.ranges[tuple(runs)] = told
    for start, end, *rest in ranges:
        whole = mine = 0  # tokens before this run: of all there are in the value, of this rank
        for run in runs:
            here = call.streams[run.stream][call.index]
            first = whole + (0 if run.held else call.start(run.stream))
            low = min(max(start - first, 0), here)
            high = here if end is None else min(max(end - first, 0), here)
            if low < high:
                its = slice(first + low - start, first + high - start)
                held = (each[its] if isinstance(each, Tensor) and each.ndim else each for each in rest)
                found.append((mine + low, mine + high, *held))
            whole += here if run.held else call.total(run.stream)
            mine += here
    return found


def gather_grid(call: TokenCall, value: Tensor, dim: int) -> Tensor:
    """All rows or columns, each of one value or of several: of the pixels of its patches."""
    if GRID in call.uncut:
        return value
    at, mine = dim + _longer_side(call), call.streams[GRID][call.index]
    rows = value.unflatten(at, (mine, -1))
    return call.gather(GRID, rows, dim=at).flatten(at, at + 1)


def _longer_side(call: TokenCall) -> int:
    _, height, width = call.grid
    return 1 if height >= width else 2
