"""Sequence parallel attention: Ulysses inside, Ring outside, either of them of degree one.

Letters: `B` batch, `S` tokens of this rank, `T` tokens of its ulysses group, `H` heads, `D` head size, `U` ulysses
degree, `R` ring degree. Sources: DeepSpeed-Ulysses (arXiv 2309.14509, section 3), Ring Attention (arXiv 2310.01889),
their product as in USP (arXiv 2405.07719, algorithm 1).

Owns the exchange of heads against tokens and the ring of keys and values. Attention sees every token once and no
padding; the order of tokens is that of the ranks, which softmax attention does not notice.
"""

import torch

from .collectives import Axis
from .kernels import attention, attention_with_lse, merge


class SequenceAttention:
    """`attend` over tokens that are spread over `ring` x `ulysses` ranks, ulysses the inner axis."""

    def __init__(self, *, ring: Axis, ulysses: Axis) -> None:
        self.ring = ring
        self.ulysses = ulysses

    @property
    def parts(self) -> int:
        """Number of ranks that share the sequence."""
        return self.ring.size * self.ulysses.size

    @property
    def index(self) -> int:
        """This rank's part of the sequence."""
        return self.ring.index * self.ulysses.size + self.ulysses.index

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        lengths: tuple[int, ...],
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of this rank's queries over everybody's keys.

        q, k, v (B, S, H, D) of this rank; `lengths` the S of every part, in part order; `mask` (B or 1, all tokens, all
        tokens), added to the scores, with the tokens in part order too. Returns (B, S, H, D).
        """
        size = self.ulysses.size
        groups = [lengths[start : start + size] for start in range(0, len(lengths), size)]
        mine = groups[self.ring.index]
        if size > 1:
            q, k, v = self._heads_for_tokens(q, k, v, lengths=mine)  # (B, T, H/U, D)
        if self.ring.size > 1:
            totals = [sum(group) for group in groups]
            start = sum(totals[: self.ring.index])
            rows = None if mask is None else mask[:, start : start + totals[self.ring.index]]
            out = self._around_the_ring(q, k, v, lengths=totals, mask=rows)
        else:
            out = attention(q, k, v, mask=mask)
        return self._tokens_for_heads(out, lengths=mine) if size > 1 else out

    def _heads_for_tokens(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, lengths: tuple[int, ...]
    ) -> tuple[torch.Tensor, ...]:
        """Give away all but H/U heads, get the other ranks' tokens of those heads: one packed all-to-all."""
        size = self.ulysses.size
        batch, tokens, heads, width = q.shape
        # (U, S, 3, B, H/U, D): tokens outermost within a destination, so that what arrives needs no reordering
        send = q.new_empty((size, tokens, 3, batch, heads // size, width))
        for slot, tensor in enumerate((q, k, v)):
            send[:, :, slot] = tensor.unflatten(2, (size, -1)).permute(2, 1, 0, 3, 4)
        received = self.ulysses.all_to_all(
            send.flatten(0, 1), send_lengths=(tokens,) * size, receive_lengths=lengths
        )  # (T, 3, B, H/U, D)
        q, k, v = received.permute(1, 2, 0, 3, 4).unbind(0)  # each (B, T, H/U, D)
        return q, k, v

    def _tokens_for_heads(self, out: torch.Tensor, *, lengths: tuple[int, ...]) -> torch.Tensor:
        """The way back: (B, T, H/U, D) of all tokens to (B, S, H, D) of this rank's."""
        tokens = lengths[self.ulysses.index]
        send = out.transpose(0, 1).contiguous()  # (T, B, H/U, D)
        received = self.ulysses.all_to_all(
            send, send_lengths=lengths, receive_lengths=(tokens,) * self.ulysses.size
        )  # (U * S, B, H/U, D)
        received = received.unflatten(0, (self.ulysses.size, tokens))
        return received.permute(2, 1, 0, 3, 4).flatten(2, 3)  # (B, S, H, D)

    def _around_the_ring(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, lengths: list[int], mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Pass keys and values around; the next hop travels while the present part is computed.

        `lengths` are the groups' tokens; `mask` holds the rows of this group's queries.
        """
        batch, queries, heads, width = q.shape
        held = torch.stack((k, v)).contiguous()  # (2, B, T, H, D)
        out = lse = None
        for hop in range(self.ring.size):
            owner = (self.ring.index - hop) % self.ring.size
            shift = None
            if hop + 1 < self.ring.size:
                coming = lengths[(owner - 1) % self.ring.size]
                arriving = held.new_empty((2, batch, coming, heads, width))
                shift = self.ring.start_shift(held, arriving)
            if queries and lengths[owner]:
                start = sum(lengths[:owner])
                columns = None if mask is None else mask[:, :, start : start + lengths[owner]]
                part_out, part_lse = attention_with_lse(q, held[0], held[1], mask=columns)
                if out is None or lse is None:
                    out, lse = part_out.to(torch.float32, copy=True), part_lse
                else:
                    out, lse = merge(out, lse, part_out, part_lse)
            if shift is not None:
                shift.wait()
                held = arriving
        return q if out is None else out.to(q.dtype)


class LocalAttention:
    """The negative control: every rank attends to its own tokens only. Wrong on purpose for more than one rank."""

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        lengths: tuple[int, ...],
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `SequenceAttention.attend`, without any exchange and without the mask."""
        return attention(q, k, v)
