"""Sequence parallel attention: Ulysses inside, Ring outside, either of them of degree one.

Letters: `B` batch, `S` tokens of this rank, `T` tokens of its ulysses group, `H` heads, `D` head size, `U` ulysses
degree, `R` ring degree. Sources: DeepSpeed-Ulysses (arXiv 2309.14509, section 3), Ring Attention (arXiv 2310.01889),
their product as in USP (arXiv 2405.07719, algorithm 1).

Owns the exchange of heads against tokens and the ring of keys and values. Attention sees every token once and no
padding; the order of tokens is that of the ranks, which softmax attention does not notice.
"""

from collections.abc import Callable

import torch

from .collectives import Axis, Shift
from .kernels import attention, attention_with_lse, merge
from .traffic import GATHER_BYTES, gathers

Finish = Callable[[torch.Tensor | None], torch.Tensor]


class SequenceAttention:
    """`attend` over tokens that are spread over `ring` x `ulysses` ranks, ulysses the inner axis."""

    def __init__(self, *, ring: Axis, ulysses: Axis, gather_bytes: int = GATHER_BYTES) -> None:
        self.ring = ring
        self.ulysses = ulysses
        self.gather_bytes = gather_bytes

    def hopping(self) -> "SequenceAttention":
        """The same, but for a ring that hops however few the tokens are."""
        return SequenceAttention(ring=self.ring, ulysses=self.ulysses, gather_bytes=-1)

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
        return self.begin(q, k, v, lengths=lengths)(mask)

    def begin(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, lengths: tuple[int, ...]) -> Finish:
        """Send what other ranks need first, and return: it travels while this rank does something else.

        The arguments and what the returned function takes and returns are those of `attend`.
        """
        size = self.ulysses.size
        groups = [lengths[start : start + size] for start in range(0, len(lengths), size)]
        totals = [sum(group) for group in groups]
        if size == 1:
            return self._begin_ring(q, k, v, lengths=totals)
        mine = groups[self.ring.index]
        exchange = self.ulysses.start_all_to_all(
            self._by_destination(q, k, v), send_lengths=(q.shape[1],) * size, receive_lengths=mine
        )

        def finish(mask: torch.Tensor | None) -> torch.Tensor:
            received = exchange.wait().permute(1, 2, 0, 3, 4)  # (3, B, T, H/U, D)
            out = self._begin_ring(*received.unbind(0), lengths=totals)(mask)
            return self._tokens_for_heads(out, lengths=mine)

        return finish

    def _by_destination(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """All heads (B, S, H, D), laid out for whom they go to: (U * S, 3, B, H/U, D).

        Tokens are outermost within a destination, so that what arrives needs no reordering.
        """
        size = self.ulysses.size
        batch, tokens, heads, width = q.shape
        send = q.new_empty((size, tokens, 3, batch, heads // size, width))
        for slot, tensor in enumerate((q, k, v)):
            send[:, :, slot] = tensor.unflatten(2, (size, -1)).permute(2, 1, 0, 3, 4)
        return send.flatten(0, 1)

    def _tokens_for_heads(self, out: torch.Tensor, *, lengths: tuple[int, ...]) -> torch.Tensor:
        """The way back: (B, T, H/U, D) of all tokens to (B, S, H, D) of this rank's."""
        tokens = lengths[self.ulysses.index]
        send = out.transpose(0, 1).contiguous()  # (T, B, H/U, D)
        received = self.ulysses.all_to_all(
            send, send_lengths=lengths, receive_lengths=(tokens,) * self.ulysses.size
        )  # (U * S, B, H/U, D)
        received = received.unflatten(0, (self.ulysses.size, tokens))
        return received.permute(2, 1, 0, 3, 4).flatten(2, 3)  # (B, S, H, D)

    def _begin_ring(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, lengths: list[int]) -> Finish:
        """Attention over the keys of all groups, whose tokens `lengths` are. q, k, v (B, T, H/U, D) of this group."""
        if self.ring.size == 1:
            return lambda mask: attention(q, k, v, mask=mask)
        start = sum(lengths[: self.ring.index])
        mine = slice(start, start + lengths[self.ring.index])  # the rows of a mask that are this group's queries
        row_bytes = k.element_size() * k.shape[0] * k.shape[2] * k.shape[3]
        if gathers(sum(lengths), row_bytes=row_bytes, limit=self.gather_bytes):
            return self._begin_gather(q, k, v, lengths=lengths, mine=mine)
        held = torch.stack((k, v)).contiguous()  # (2, B, T, H/U, D)
        first = self._start_hop(held, 0, lengths=lengths)
        return lambda mask: self._around_the_ring(
            q, held, first, lengths=lengths, mask=None if mask is None else mask[:, mine]
        )

    def _begin_gather(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, lengths: list[int], mine: slice
    ) -> Finish:
        """Keys and values so small that a message costs by its number: everybody's at once, one call of the kernel."""
        size = self.ring.size
        batch, tokens, heads, width = k.shape
        send = k.new_empty((size, tokens, 2, batch, heads, width))
        for slot, tensor in enumerate((k, v)):
            send[:, :, slot] = tensor.transpose(0, 1)
        exchange = self.ring.start_all_to_all(
            send.flatten(0, 1), send_lengths=(tokens,) * size, receive_lengths=tuple(lengths)
        )

        def finish(mask: torch.Tensor | None) -> torch.Tensor:
            keys, values = exchange.wait().permute(1, 2, 0, 3, 4).unbind(0)  # (B, all tokens, H/U, D)
            return attention(q, keys, values, mask=None if mask is None else mask[:, mine])

        return finish

    def _start_hop(self, held: torch.Tensor, hop: int, *, lengths: list[int]) -> tuple[Shift, torch.Tensor] | None:
        """Send on the keys and values that are held at `hop`; also returns where the next arrive. None at the last."""
        if hop + 1 == self.ring.size:
            return None
        coming = lengths[(self.ring.index - hop - 1) % self.ring.size]
        arriving = held.new_empty((*held.shape[:2], coming, *held.shape[3:]))
        return self.ring.start_shift(held, arriving), arriving

    def _around_the_ring(
        self,
        q: torch.Tensor,
        held: torch.Tensor,
        under_way: tuple[Shift, torch.Tensor] | None,
        *,
        lengths: list[int],
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Pass keys and values around; the next hop travels while the present part is computed.

        `held` (2, B, T, H/U, D) is this group's own, already `under_way`; `lengths` are the groups' tokens; `mask`
        holds the rows of this group's queries.
        """
        out = lse = None
        for hop in range(self.ring.size):
            owner = (self.ring.index - hop) % self.ring.size
            if hop:
                under_way = self._start_hop(held, hop, lengths=lengths)
            if q.shape[1] and lengths[owner]:
                start = sum(lengths[:owner])
                columns = None if mask is None else mask[:, :, start : start + lengths[owner]]
                part_out, part_lse = attention_with_lse(q, held[0], held[1], mask=columns)
                if out is None or lse is None:
                    out, lse = part_out.to(torch.float32, copy=True), part_lse
                else:
                    out, lse = merge(out, lse, part_out, part_lse)
            if under_way is not None:
                shift, held = under_way
                shift.wait()
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

    def begin(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, lengths: tuple[int, ...]) -> Finish:
        """As `SequenceAttention.begin`, without any exchange and without the mask."""
        return lambda mask: attention(q, k, v)
