"""Who holds which tokens, and whether all are few: uneven lengths planned once, as Python ints.

Text and image are split apart, so that every rank holds a little of both: replicating the text costs about a quarter
of the speed at eight ranks. Lengths may be zero; nothing is ever padded.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

# Up to here, one message to each and one kernel take less time than two, or than hops, parts and their merging.
GATHER_BYTES = 1 << 20
NEVER = -1


@lru_cache(maxsize=1024)  # a step asks for the same ones again and again
def split_lengths(total: int, parts: int) -> tuple[int, ...]:
    """Cut `total` tokens into `parts` runs whose lengths differ by at most one, longer ones first."""
    if total < 0 or parts < 1:
        raise ValueError(f"cannot cut {total} tokens into {parts} parts; use at least 0 tokens and 1 part")
    base, extra = divmod(total, parts)
    return tuple(base + (part < extra) for part in range(parts))


def gathers(tokens: int, *, row_bytes: int, limit: int = GATHER_BYTES) -> bool:
    """Whether ranks send their keys and values to everybody at once: all `tokens` of them are few enough bytes.

    `row_bytes` are one token's keys, B H D e. Every rank must say the same, so this knows what all know.
    """
    return 2 * tokens * row_bytes <= limit


@dataclass(frozen=True)
class SequenceShard:
    """The tokens of one rank out of `parts`: its run of the text, then its run of the image."""

    num_text: int
    num_image: int
    parts: int
    index: int
    first_image: int = 0  # where the image's run of tokens begins in the whole image: above zero in a patch of it

    @property
    def lengths(self) -> tuple[int, ...]:
        """Local sequence length (text + image) of every part, in part order."""
        text = split_lengths(self.num_text, self.parts)
        # Image runs are dealt from the other end, so that the part with one text token more has none more of the image.
        image = split_lengths(self.num_image, self.parts)[::-1]
        return tuple(t + i for t, i in zip(text, image, strict=True))

    @property
    def text(self) -> slice:
        """This part's rows of the whole text."""
        return _run(split_lengths(self.num_text, self.parts), self.index)

    @property
    def image(self) -> slice:
        """This part's rows of the whole image."""
        return _run(split_lengths(self.num_image, self.parts)[::-1], self.index, first=self.first_image)

    @property
    def order(self) -> list[int]:
        """Where each token of the whole sequence (text, then image) stands when all parts are laid end to end."""
        rows: list[int] = []
        for index in range(self.parts):
            part = replace(self, index=index)
            rows.extend(range(part.text.start, part.text.stop))
            rows.extend(range(self.num_text + part.image.start, self.num_text + part.image.stop))
        return rows

    def take(self, tensor: torch.Tensor, *, stream: str, dim: int) -> torch.Tensor:
        """This part's view of a whole tensor along `dim`. `stream` is `text` or `image`.

        A tensor shorter than the stream (a residual for its first rows) is cut where it ends.
        """
        run = self.text if stream == "text" else self.image
        start, stop = min(run.start, tensor.shape[dim]), min(run.stop, tensor.shape[dim])
        return tensor.narrow(dim, start, stop - start)


def _run(lengths: tuple[int, ...], index: int, *, first: int = 0) -> slice:
    start = first + sum(lengths[:index])
    return slice(start, start + lengths[index])
