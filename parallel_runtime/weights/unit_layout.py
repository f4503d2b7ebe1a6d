"""One unit of a model (a block, or all outside the blocks) as a flat run of bytes that ranks hold ranges of.

    | weight | pad | weight | pad | ... | pad |       each weight begins at a multiple of 64 bytes
    |    rank 0     |    rank 1     |  rank 2 |       the whole is padded to a multiple of 64 bytes times the ranks

Ranges are equal, or by shares: then they are multiples of 64 bytes, may be empty, and only the last weight is padded.
So a range begins and ends between two elements of any dtype, one gather of bytes makes the unit whole, whatever mix of
dtypes it is, and the whole weights are views of what arrived: nothing is copied out. Plain ints; owns no memory.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..parallel.shard import split_lengths

ALIGNMENT = 64  # bytes: what the processor's and the GPU's widest loads like, and a multiple of every element


@dataclass(frozen=True)
class WeightSpan:
    """Where one weight lies in its unit: `start` is a byte offset."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        """The byte after its last one."""
        return self.start + math.prod(self.shape) * self.dtype.itemsize


class UnitLayout:
    """Where each weight of a unit lies, by its name within the unit, and which rank holds which bytes of it."""

    def __init__(
        self,
        weights: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
        *,
        shards: int,
        shares: tuple[int, ...] = (),
    ) -> None:
        """`shares`: how much each rank holds compared with the others, () for equal ranges."""
        self.spans: dict[str, WeightSpan] = {}
        end = 0
        for name, (dtype, shape) in weights.items():
            self.spans[name] = WeightSpan(dtype, shape, -(-end // ALIGNMENT) * ALIGNMENT)
            end = self.spans[name].stop
        rows = max(1, -(-end // ALIGNMENT))
        counts = split_lengths(rows, shards, shares) if shares else (max(1, -(-rows // shards)),) * shards
        self.lengths = tuple(ALIGNMENT * count for count in counts)  # bytes that each rank holds

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole unit, padding included: at most 64 a weight and 64 a rank."""
        return sum(self.lengths)

    def part(self, name: str, shard: torch.Tensor, index: int) -> tuple[slice, torch.Tensor]:
        """Which elements of a weight the rank of that index holds, often none, and their view, flat, in its bytes."""
        span, begin = self.spans[name], sum(self.lengths[:index])
        low = min(max(span.start, begin), span.stop)
        high = max(min(span.stop, begin + self.lengths[index]), low)
        first, stop = ((at - span.start) // span.dtype.itemsize for at in (low, high))
        return slice(first, stop), shard[max(low - begin, 0) :][: high - low].view(span.dtype)

    def views(self, whole: torch.Tensor) -> dict[str, torch.Tensor]:
        """The weights in the bytes (num_bytes,) of the whole unit, which lie at a multiple of 64."""
        return {
            name: whole[span.start : span.stop].view(span.dtype).view(span.shape) for name, span in self.spans.items()
        }
