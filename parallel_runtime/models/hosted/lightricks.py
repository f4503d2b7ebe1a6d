"""Two objects that LTX hands its blocks instead of tensors, cut to this rank's tokens.

`CompressedTimestep` has one row for each frame and makes rows for all tokens when a block asks. `GuideAttentionMask`
has one mask for the queries of guide frames and one for all others; the model calls attention once for each.

Known by their attributes, so nothing of ComfyUI is imported.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def cut_timestep(value: Any, start: int, end: int) -> Any:  # noqa: ANN401
    """A `CompressedTimestep` that makes rows for tokens `start` to `end` alone. One row for all tokens stays."""
    if value.num_frames * value.patches_per_frame == 1:
        return value
    source: Any = type(value)
    kind = _of_some_tokens(source)
    cut = kind.__new__(kind)
    cut.data, cut.batch_size, cut.num_frames, cut.feature_dim = (
        value.data,
        value.batch_size,
        value.num_frames,
        value.feature_dim,
    )
    cut.patches_per_frame = 1  # the rows below are chosen instead
    cut.rows = torch.arange(start, end, device=value.data.device) // value.patches_per_frame
    return cut


@functools.cache
def _of_some_tokens(base: Any) -> Any:  # noqa: ANN401
    """A class of ComfyUI's `CompressedTimestep` that picks the frame of each of its tokens."""

    class SomeTokens(base):
        """ComfyUI's class with the frame of each of this rank's tokens, `rows`."""

        __slots__ = ("rows",)

        def expand(self) -> Tensor:
            return self.data.index_select(1, self.rows)

        def expand_for_computation(self, *args: object, **kwargs: object) -> tuple[Tensor, ...]:
            frames = super().expand_for_computation(*args, **kwargs)
            return tuple(values.index_select(1, self.rows) for values in frames)

    return SomeTokens


@dataclass(frozen=True)
class GuideSegment:
    """Some of the queries and their mask (1, 1, queries or 1, all keys). `first`, `last`: of this rank's queries."""

    lengths: tuple[int, ...]
    first: int
    last: int
    mask: Tensor | None


@dataclass(frozen=True)
class GuideMask:
    """The mask of all queries, then those of some of them, which hold instead."""

    all: Tensor
    segments: tuple[GuideSegment, ...]


def cut_guides(mask: Any, lengths: tuple[int, ...], index: int) -> GuideMask:  # noqa: ANN401
    """LTX's `GuideAttentionMask` for ranks that hold `lengths` tokens each, in their order."""
    total, start = sum(lengths), mask.guide_start
    end = start + mask.tracked_count
    parts = [(start, end, mask.tracked_mask)]
    if end < total:  # ComfyUI lets what follows the guides attend to everything
        parts.append((end, total, None))
    return GuideMask(mask.noisy_mask, tuple(_segment(*part, lengths, index) for part in parts))


def _segment(start: int, end: int, mask: Tensor | None, lengths: tuple[int, ...], index: int) -> GuideSegment:
    found, before = [], 0
    for length in lengths:
        low, high = (min(max(row - before, 0), length) for row in (start, end))
        found.append((low, high))
        before += length
    return GuideSegment(tuple(high - low for low, high in found), *found[index], mask)
