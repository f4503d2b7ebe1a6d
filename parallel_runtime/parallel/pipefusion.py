"""PipeFusion's cuts: which stage has which blocks, which patch has which tokens, where its keys stand in the buffer.

Letters: `N` stages, `M` patches, `P` parts (the ranks of a stage). Source: PipeFusion (arXiv 2405.14430, section 4).
Blocks are cut into N runs, the image into M runs of rows. A patch goes through the stages one after another while other
patches are in the others. Its attention sees fresh keys of itself and of the patches before it, and for the patches
after it those of the step before, which are nearly the same. The text goes with patch 0, once a step, and patch 0 has
so much less of the image: with as many patches as stages, every stage would wait for a patch that is longer.

Each patch is split over the parts of a stage by itself, so that a rank has the same rows in a step that goes through
whole. Keys and values stand part by part, within a part patch by patch:

    | part 0: text, patch 0, patch 1, .. | part 1: text, patch 0, .. | ..

Plain ints; knows no tensor and no rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch

from .shard import SequenceShard, split_lengths


def balanced_stages(costs: Sequence[float], stages: int) -> tuple[range, ...]:
    """Cut blocks of these costs into runs, none empty, whose most costly costs the least.

    By dynamic programming over (stages, blocks). Raises `ValueError` for more stages than blocks.
    """
    if not 1 <= stages <= len(costs):
        raise ValueError(f"{stages} stages for {len(costs)} blocks; use 1 to {len(costs)}")
    before = [0.0, *accumulate(costs)]
    # by number of blocks placed: the cost of the most costly run so far, and where each run ended
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, (0,))}
    for _ in range(stages):
        best = {
            end: min(
                (max(cost, before[end] - before[begin]), (*cuts, end))
                for begin, (cost, cuts) in best.items()
                if begin < end
            )
            for end in range(min(best) + 1, len(costs) + 1)
        }
    cuts = best[len(costs)][1]
    return tuple(range(begin, end) for begin, end in zip(cuts[:-1], cuts[1:], strict=True))


def patch_lengths(num_image: int, patches: int, *, num_text: int) -> tuple[int, ...]:
    """Image tokens of each patch, patch 0 being as long as the others with `num_text` of text before it.

    Where the text alone is longer than that, patch 0 has one row. None is empty, given a token for each.
    """
    if patches == 1:
        return (num_image,)
    first = max(1, -(-(num_text + num_image) // patches) - num_text)
    return first, *split_lengths(num_image - first, patches - 1)


@dataclass(frozen=True)
class PatchedSequence:
    """The tokens of one conditioning's sequence, cut into patches and those into parts. A *chunk* is a run of patches.

    Chunks are `range`s of patches: one patch, or all of them. `longest_text` is the most text tokens of any
    conditioning that has the same patches of the image, by default this one's.
    """

    num_text: int
    num_image: int
    num_patches: int
    parts: int
    longest_text: int | None = None

    @property
    def whole(self) -> range:
        """All patches."""
        return range(self.num_patches)

    def chunks(self, *, warm: bool) -> list[range]:
        """What goes through the stages at once in a call: all patches while it is warm-up, else one after another."""
        return [self.whole] if warm else [range(patch, patch + 1) for patch in self.whole]

    @cached_property
    def _shards(self) -> tuple[tuple[SequenceShard, ...], ...]:
        """By part, then by patch."""
        longest = self.num_text if self.longest_text is None else self.longest_text
        lengths = patch_lengths(self.num_image, self.num_patches, num_text=longest)
        return tuple(
            tuple(
                SequenceShard(0 if patch else self.num_text, length, self.parts, part, sum(lengths[:patch]))
                for patch, length in enumerate(lengths)
            )
            for part in range(self.parts)
        )

    def shard(self, part: int, patch: int) -> SequenceShard:
        """What a part has of a patch."""
        return self._shards[part][patch]

    def take(self, tensor: torch.Tensor, *, part: int, stream: str, dim: int) -> torch.Tensor:
        """A part's rows of a whole tensor along `dim`, of all patches; as `SequenceShard.take` for a shorter one."""
        if stream == "text":
            return self.shard(part, 0).take(tensor, stream=stream, dim=dim)
        return torch.cat([shard.take(tensor, stream=stream, dim=dim) for shard in self._shards[part]], dim)

    def num_rows(self, part: int, chunk: range, *, stream: str) -> int:
        """How many tokens of a stream a part has in a chunk."""
        shards = self._shards[part][chunk.start : chunk.stop]
        runs = [shard.text if stream == "text" else shard.image for shard in shards]
        return sum(run.stop - run.start for run in runs)

    def lengths(self, chunk: range) -> tuple[int, ...]:
        """Tokens of a chunk, text and image, of every part."""
        return tuple(
            self.num_rows(part, chunk, stream="text") + self.num_rows(part, chunk, stream="image")
            for part in range(self.parts)
        )

    def rows(self, part: int, chunk: range) -> slice:
        """Where a chunk's tokens stand among all that a part has, text first."""
        start = self.lengths(range(chunk.start))[part]
        return slice(start, start + self.lengths(chunk)[part])

    def image_rows(self, part: int, chunk: range) -> slice:
        """As `rows`, among the part's image tokens."""
        start = self.num_rows(part, range(chunk.start), stream="image")
        return slice(start, start + self.num_rows(part, chunk, stream="image"))

    def slot(self, part: int, chunk: range) -> slice:
        """Where a part's keys of a chunk stand in the buffer."""
        before, rows = sum(self.lengths(self.whole)[:part]), self.rows(part, chunk)
        return slice(before + rows.start, before + rows.stop)

    @cached_property
    def order(self) -> list[int]:
        """For each place of the buffer, the token of the whole sequence (text, then image) that stands there."""
        found: list[int] = []
        for shards in self._shards:
            found.extend(range(shards[0].text.start, shards[0].text.stop))
            for shard in shards:
                found.extend(range(self.num_text + shard.image.start, self.num_text + shard.image.stop))
        return found
