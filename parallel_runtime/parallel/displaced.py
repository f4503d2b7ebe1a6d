"""Attention of a patch over the keys of the whole image, of which those of later patches are a step old.

Letters: `B` batch, `S` tokens of the chunk on this rank, `T` those of its ulysses group, `A` tokens of all, `H` heads,
`D` head size, `U` ulysses degree, `R` ring degree. Source: PipeFusion (arXiv 2405.14430, section 4.2).

The buffer of a block holds the keys and values of every token for this rank's H/U heads. Ulysses exchanges heads
against tokens as it does elsewhere. Around the ring only the chunk's fresh keys travel, R - 1 hops, and every ring rank
keeps all: the buffer is the same on each, as in the paper and in xDiT, and attention is local. Memory is the price.

Owns what is written where. Which patch has which tokens is `pipefusion.py`'s.
"""

from functools import partial

import torch

from .collectives import Shift
from .kernels import attention
from .pipefusion import PatchedSequence
from .sequence import Complete, PendingOutput, SequenceAttention


class DisplacedAttention(SequenceAttention):
    """`start_displaced` over a sequence in patches that `ring` x `ulysses` ranks share."""

    def new_buffer(self, sequence: PatchedSequence, *, like: torch.Tensor, batch: int, heads: int) -> torch.Tensor:
        """Room for a block's keys and values, (2, B, A, H/U, D); `like` (D,) has the dtype and the device."""
        tokens = sum(sequence.lengths(sequence.whole))
        return like.new_zeros((2, batch, tokens, heads // self.ulysses.size, like.shape[0]))

    def mask_rows(self, sequence: PatchedSequence, chunk: range, mask: torch.Tensor) -> torch.Tensor:
        """Of a mask (B or 1, all tokens, all tokens) what this rank's queries of a chunk need, (B or 1, T, A)."""
        queries = [token for part in self._group(self.ring.index) for token in _tokens(sequence, part, chunk)]
        rows, columns = (torch.tensor(order, device=mask.device) for order in (queries, sequence.order))
        return mask.index_select(1, rows).index_select(2, columns)

    def start_displaced(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        held: torch.Tensor,
        sequence: PatchedSequence,
        chunk: range,
    ) -> Complete:
        """Send what other ranks need of a chunk first. Completing writes to the buffer, and attends to all in it.

        q, k, v (B, S, H, D) of this rank; `held` as `new_buffer` made it. The returned function takes a mask as
        `mask_rows`, added to the scores, and returns as that of `start`.
        """
        start = partial(self._start_held, held=held, sequence=sequence, chunk=chunk)
        if self.ulysses.size == 1:
            return start(q, k, v)
        lengths = sequence.lengths(chunk)
        mine = tuple(lengths[part] for part in self._group(self.ring.index))
        return self._start_exchange(q, k, v, lengths=mine, start=start)

    def _start_held(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        held: torch.Tensor,
        sequence: PatchedSequence,
        chunk: range,
    ) -> Complete:
        """As `start_displaced`, for heads (B, T, H/U, D) that this rank has of its whole ulysses group."""
        fresh, groups = torch.stack((k, v)), self._groups_on_the_way()
        shift = self._start_shift(fresh, groups[1], sequence.lengths(chunk)) if len(groups) > 1 else None

        def complete(mask: torch.Tensor | None) -> PendingOutput:
            nonlocal fresh, shift
            for hop, group in enumerate(groups):
                self._store(fresh, held, sequence=sequence, chunk=chunk, group=group)
                if shift is not None:
                    under_way, fresh = shift
                    under_way.wait()
                    more = hop + 2 < len(groups)
                    shift = self._start_shift(fresh, groups[hop + 2], sequence.lengths(chunk)) if more else None
            return PendingOutput.here(attention(q, held[0], held[1], mask=mask))

        return complete

    def _groups_on_the_way(self) -> list[range]:
        """The parts whose keys this rank holds at each hop, its own first."""
        return [self._group((self.ring.index - hop) % self.ring.size) for hop in range(self.ring.size)]

    def _start_shift(self, fresh: torch.Tensor, group: range, lengths: tuple[int, ...]) -> tuple[Shift, torch.Tensor]:
        """Pass on what is held; also returns where that of `group` arrives."""
        arriving = fresh.new_empty((*fresh.shape[:2], sum(lengths[part] for part in group), *fresh.shape[3:]))
        return self.ring.start_shift(fresh, arriving), arriving

    def _group(self, ring_index: int) -> range:
        """The parts of one ulysses group."""
        return range(ring_index * self.ulysses.size, (ring_index + 1) * self.ulysses.size)

    def _store(
        self, fresh: torch.Tensor, held: torch.Tensor, *, sequence: PatchedSequence, chunk: range, group: range
    ) -> None:
        """A group's keys and values (2, B, T, H/U, D), part after part, to their places."""
        slots = [sequence.slot(part, chunk) for part in group]
        runs = fresh.split([slot.stop - slot.start for slot in slots], dim=2)
        for slot, run in zip(slots, runs, strict=True):
            held[:, :, slot] = run


def _tokens(sequence: PatchedSequence, part: int, chunk: range) -> list[int]:
    """The tokens of the whole sequence that a part has in a chunk, in their order there."""
    slot = sequence.slot(part, chunk)
    return sequence.order[slot.start : slot.stop]
