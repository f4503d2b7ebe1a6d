"""The function of each word of a spec: what it does to a value of a call, found once, when a model is shared."""

from functools import partial
from typing import Any

from ..specs.words import Each, Every, Frames, Grid, Guides, Index, Last, Order, Ranges, Tokens, Word
from .call import TokenCall
from .cuts import (
    Change,
    cut_frames,
    cut_guide_mask,
    cut_index,
    cut_last,
    cut_tokens,
    gather_tokens,
    of_tensors,
)
from .places import cut_grid, cut_ranges, gather_grid, in_part_order


def cutter(word: Word) -> Change:
    """The function that takes this rank's tokens of a value."""
    if isinstance(word, Each):
        return _of_each([cutter(part) if part else None for part in word.words])
    if isinstance(word, Ranges):
        return lambda call, value: value if value is None else cut_ranges(call, value, word.runs)
    if isinstance(word, Index):
        return lambda call, value: value if value is None else cut_index(call, value, word.stream)
    if isinstance(word, Last):
        return of_tensors(partial(cut_last, stream=word.stream))
    if isinstance(word, Every):
        return lambda call, value: call.introduce_whole(word.stream, value)
    if isinstance(word, Order):
        return of_tensors(partial(in_part_order, runs=word.runs))
    if isinstance(word, Grid):
        return of_tensors(partial(cut_grid, word=word))
    if isinstance(word, Frames):
        return partial(cut_frames, word=word)
    if isinstance(word, Guides):
        return partial(cut_guide_mask, stream=word.stream)
    return of_tensors(partial(cut_tokens, word=word))


def gatherer(word: Word) -> Change:
    """The function that makes a value whole. Raises ValueError for words that have no way back."""
    if isinstance(word, Each):
        return _of_each([gatherer(part) if part else None for part in word.words])
    if isinstance(word, Grid) and not word.flat:
        return of_tensors(partial(gather_grid, dim=word.dim))
    if isinstance(word, Tokens) and not (word.rest or word.heads):
        return of_tensors(partial(gather_tokens, word=word))
    raise ValueError(f"{word} cannot be gathered; use streams or 'grid'")


def _of_each(changes: list[Change | None]) -> Change:
    def change(call: TokenCall, values: Any) -> Any:  # noqa: ANN401
        if values is None:
            return None
        pairs = zip(values, changes, strict=True)
        return type(values)([each(call, value) if each else value for value, each in pairs])

    return change
