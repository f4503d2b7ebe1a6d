"""Sequence parallel attention: Ulysses inside, Ring outside, either of them of degree one.

Letters: `B` batch, `S` tokens of this rank, `T` tokens of its ulysses group, `H` heads, `D` head size, `U` ulysses
degree, `R` ring degree. Sources: DeepSpeed-Ulysses (arXiv 2309.14509, section 3), Ring Attention (arXiv 2310.01889),
their product as in USP (arXiv 2405.07719, algorithm 1).

Where all keys and values are few bytes, messages cost by their number: then everybody gets all of them in one, whatever
the mesh, and attends with all heads.

Owns the exchange of heads against tokens and the gathering of keys; the hops of a ring are ring.py's. Attention sees
every token once and no padding; the order of tokens is that of the ranks, which softmax attention does not notice.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from .collectives import Axis
from .kernels import attention
from .ring import RingPass
from .shard import GATHER_BYTES, NEVER, gathers


@dataclass(frozen=True)
class PendingOutput:
    """Attention's output (B, S, H, D), H in one dim or two. `wait` gives it; `under_way`: other ranks send it still."""

    wait: Callable[[], torch.Tensor]
    under_way: bool = False

    @classmethod
    def here(cls, out: torch.Tensor) -> "PendingOutput":
        """One that nobody waits for."""
        return cls(lambda: out)


Complete = Callable[[torch.Tensor | None], PendingOutput]


class SequenceAttention:
    """Attention over tokens that are spread over `ring` x `ulysses` ranks, ulysses the inner axis.

    `whole` is the axis of all of them; without it, that of the two which is alone.
    """

    def __init__(
        self, *, ring: Axis, ulysses: Axis, whole: Axis | None = None, gather_bytes: int = GATHER_BYTES
    ) -> None:
        self.ring = ring
        self.ulysses = ulysses
        self.whole = whole or (ring if ulysses.size == 1 else ulysses)
        self.gather_bytes = gather_bytes
        self.parts = ring.size * ulysses.size  # number of ranks that share the sequence
        self.index = ring.index * ulysses.size + ulysses.index  # of this rank's part

    def ungathered(self) -> "SequenceAttention":
        """The same, but for exchanging heads and hopping however few the tokens are."""
        return SequenceAttention(ring=self.ring, ulysses=self.ulysses, whole=self.whole, gather_bytes=NEVER)

    def start(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, lengths: tuple[int, ...]) -> Complete:
        """Send what other ranks need first, and return: it travels while this rank does something else.

        q, k, v (B, S, H, D) of this rank; `lengths` the S of every part, in part order. The returned function takes a
        mask (B or 1, all tokens, all tokens), added to the scores, with the tokens in part order too; it attends, and
        begins to send the output (B, S, H, D), H in one dim or two, to where it belongs.
        """
        row_bytes = k.element_size() * k.shape[0] * k.shape[2] * k.shape[3]
        if self.parts > 1 and gathers(sum(lengths), row_bytes=row_bytes, limit=self.gather_bytes):
            return self._start_gather(q, k, v, lengths=lengths)
        size = self.ulysses.size
        groups = [lengths[start : start + size] for start in range(0, len(lengths), size)]
        totals = [sum(group) for group in groups]
        if size == 1:
            return self._start_ring(q, k, v, lengths=totals)
        mine = groups[self.ring.index]
        return self._start_exchange(q, k, v, lengths=mine, start=partial(self._start_ring, lengths=totals))

    def _start_exchange(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        lengths: tuple[int, ...],
        start: Callable[..., Complete],
    ) -> Complete:
        """Tokens exchanged for heads, and back. `start` is given q, k, v (B, T, H/U, D) of all tokens of the group.

        q, k, v (B, S, H, D) of this rank; `lengths` the S of every part of its ulysses group.
        """
        exchange = self.ulysses.start_all_to_all(
            self._by_destination(q, k, v), send_lengths=(q.shape[1],) * self.ulysses.size, receive_lengths=lengths
        )

        def complete(mask: torch.Tensor | None) -> PendingOutput:
            received = exchange.wait().permute(1, 2, 0, 3, 4)  # (3, B, T, H/U, D)
            return self._tokens_for_heads(start(*received.unbind(0))(mask), lengths=lengths)

        return complete

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

    def _tokens_for_heads(self, out: PendingOutput, *, lengths: tuple[int, ...]) -> PendingOutput:
        """The way back, begun: (B, T, H/U, D) of all tokens to (B, S, U, H/U, D) of this rank's."""
        size, tokens = self.ulysses.size, lengths[self.ulysses.index]
        send = out.wait().transpose(0, 1).contiguous()  # (T, B, H/U, D)
        exchange = self.ulysses.start_all_to_all(send, send_lengths=lengths, receive_lengths=(tokens,) * size)

        def wait() -> torch.Tensor:
            received = exchange.wait().unflatten(0, (size, tokens))  # (U, S, B, H/U, D)
            return received.permute(2, 1, 0, 3, 4)

        return PendingOutput(wait, under_way=True)

    def _start_ring(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, lengths: list[int]) -> Complete:
        """Attention over the keys of all groups, whose tokens `lengths` are. q, k, v (B, T, H/U, D) of this group."""
        if self.ring.size == 1:
            return lambda mask: PendingOutput.here(attention(q, k, v, mask=mask))
        mine = _rows_of(self.ring.index, lengths)
        keys = RingPass(self.ring, k, v, lengths=lengths)

        def complete(mask: torch.Tensor | None) -> PendingOutput:
            out = keys.attend(q, mask=None if mask is None else mask[:, mine])
            return PendingOutput.here(q if out is None else out.to(q.dtype))

        return complete

    def _start_gather(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, lengths: tuple[int, ...]) -> Complete:
        """Everybody's keys and values at once, one call of the kernel. Arguments as for `start`."""
        size, mine = self.parts, _rows_of(self.index, lengths)
        batch, tokens, heads, width = k.shape
        send = k.new_empty((size, tokens, 2, batch, heads, width))
        for slot, tensor in enumerate((k, v)):
            send[:, :, slot] = tensor.transpose(0, 1)
        exchange = self.whole.start_all_to_all(
            send.flatten(0, 1), send_lengths=(tokens,) * size, receive_lengths=lengths
        )

        def complete(mask: torch.Tensor | None) -> PendingOutput:
            keys, values = exchange.wait().permute(1, 2, 0, 3, 4).unbind(0)  # (B, all tokens, H, D)
            return PendingOutput.here(attention(q, keys, values, mask=None if mask is None else mask[:, mine]))

        return complete


class LocalAttention:
    """The negative control: every rank attends to its own tokens only. Wrong on purpose for more than one rank."""

    def start(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, lengths: tuple[int, ...]) -> Complete:
        """As `SequenceAttention.start`, without any exchange and without the mask."""
        return lambda mask: PendingOutput.here(attention(q, k, v))


def _rows_of(index: int, lengths: Sequence[int]) -> slice:
    """Where the tokens of one part lie among those of all parts, or of one group among those of all groups."""
    start = sum(lengths[:index])
    return slice(start, start + lengths[index])
