"""Sequence parallel attention for any model: uneven and grouped heads, unequal lengths, masks, any attention function.

Letters: `B` batch, `Hq` and `Hk` heads of queries and of keys, `S` query tokens and `T` key tokens of this rank, `D`
and `Dv` sizes of a head of keys and of values, `U` ulysses degree, `R` ring degree. Sources as in `sequence.py`, which
does the same for a model whose blocks are written for it: heads that the degree divides, one length, output on its way
while the block goes on.

Heads are shared out by whole groups (a head of keys with its heads of queries), the first ranks one more where they do
not come out even. Where there are fewer groups than ranks, or a mask differs by head under Ring, every rank gets all
keys and values, and attends with its own queries.

Owns who computes which heads and what is exchanged for that. Does not own which tokens a rank has, nor the function
that computes attention: a model brings its own. Ring alone uses ours, which says the log-sum-exp.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TypeAlias

import torch
import torch.nn.functional as F

from .collectives import Axis
from .kernels import additive_mask
from .ring import RingPass
from .shard import split_lengths

# q (B, heads, S, D), k and v (B, heads of keys, T, D). Whoever is given the list empties it: what was sent away is not
# held while a kernel runs, nor what the kernel is done with.
QKV: TypeAlias = list[torch.Tensor]
# Those, heads of q, a mask or None; returns (B, heads, S, Dv).
AttentionFunction: TypeAlias = Callable[[QKV, int, torch.Tensor | None], torch.Tensor]


class UnevenSequence:
    """Attention over tokens spread over `ring` x `ulysses` ranks, ulysses the inner axis.

    `whole` is the axis of all of them; without it, that of the two which is alone.
    """

    def __init__(self, *, ring: Axis, ulysses: Axis, whole: Axis | None = None) -> None:
        self.ring = ring
        self.ulysses = ulysses
        self.whole = whole or (ring if ulysses.size == 1 else ulysses)
        self.parts = ring.size * ulysses.size
        self.index = ring.index * ulysses.size + ulysses.index
        self.named = ""  # the kernel of a package that was asked for (named_kernels.py)

    def gather(self, tensor: torch.Tensor, *, dim: int, lengths: Sequence[int]) -> torch.Tensor:
        """The tensors of all parts as one along `dim`, in part order; `lengths` has how long each part's is there.

        Any dtype. Short parts are sent as long as the longest one.
        """
        if self.parts == 1:
            return tensor
        mine = tensor.movedim(dim, 0).contiguous()
        row = mine.shape[1:]
        row_bytes = row.numel() * mine.element_size()
        room = max(lengths) * row_bytes
        if room == 0:
            return tensor
        send = torch.empty(room, dtype=torch.uint8, device=mine.device)
        send[: mine.nbytes] = mine.view(-1).view(torch.uint8) if mine.numel() else send[:0]
        received = torch.empty(self.parts * room, dtype=torch.uint8, device=mine.device)
        self.whole.start_all_gather(send, received).wait()
        parts = [
            received[part * room : part * room + length * row_bytes].view(mine.dtype).view(length, *row)
            for part, length in enumerate(lengths)
        ]
        return torch.cat(parts).movedim(0, dim)

    def maximum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The largest over all parts of each number of `tensor`."""
        return tensor if self.parts == 1 else self.whole.maximum(tensor)

    def whole_keys(
        self, k: torch.Tensor, v: torch.Tensor, *, lengths: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (B, Hk, T, D) and values (B, Hk, T, Dv) of all parts, in part order; one message to each."""
        both = self.gather(torch.cat((k, v), 3), dim=2, lengths=lengths)
        keys, values = both.split((k.shape[-1], v.shape[-1]), 3)
        return keys, values

    def attend(
        self,
        kernel: AttentionFunction,
        qkv: QKV,
        *,
        query_lengths: Sequence[int],
        key_lengths: Sequence[int],
        mask: torch.Tensor | None = None,
        scale: float | None = None,
        common: int = 0,
    ) -> torch.Tensor:
        """Attention of this rank's queries over everybody's keys.

        `qkv`, which is emptied: q (B, Hq, S, D), k (B, Hk, T, D), v (B, Hk, T, Dv) of this rank, Hq a multiple of Hk;
        the lengths are the S and the T of every part, in part order; `mask` (B or 1, Hq or 1, all queries or 1, all
        keys), bool or added to the scores, with tokens in part order. `scale`, 1 / sqrt(D) by default, must be the one
        that `kernel` uses. `common`: so many keys, before the T, are the same on every rank. They are not sent, and
        come before all others in `mask`. Returns (B, Hq, S, Dv).
        """
        if self.parts == 1:
            return kernel(qkv, qkv[0].shape[1], mask)
        q, k, v = qkv
        qkv.clear()
        by_head = mask is not None and mask.shape[1] > 1
        if k.shape[1] < self.ulysses.size or (by_head and self.ring.size > 1):
            return self._over_all_keys(kernel, q, k, v, query_lengths, key_lengths, mask, common)
        groups = split_lengths(k.shape[1], self.ulysses.size)
        queries_a_group = q.shape[1] // k.shape[1]
        heads = tuple(count * queries_a_group for count in groups)
        if self.ulysses.size > 1:
            first = sum(groups[: self.ulysses.index])
            here = [each[:, first : first + groups[self.ulysses.index], :common] for each in (k, v)]
            k, v = k[:, :, common:], v[:, :, common:]
            q, k, v = self._heads_for_tokens(q, k, v, groups, heads, query_lengths, key_lengths)
            k, v = _behind(here, (k, v))
            del here
        mask = self._mask_of(mask, heads, query_lengths)
        if self.ring.size > 1:
            totals = [sum(group) for group in self._by_ring(key_lengths)]
            out = self._around_the_ring(q, k, v, lengths=totals, mask=mask, scale=scale, common=common)
        elif q.shape[2]:
            qkv += (q, k, v)
            del q, k, v
            out = kernel(qkv, qkv[0].shape[1], mask)
        else:
            out = q.new_empty((*q.shape[:3], v.shape[-1]))
        if self.ulysses.size > 1:
            out = self._tokens_for_heads(out, heads, self._by_ring(query_lengths)[self.ring.index])
        return out

    def _by_ring(self, lengths: Sequence[int]) -> list[Sequence[int]]:
        """The lengths of the parts of each ulysses group, in the order of the ring."""
        size = self.ulysses.size
        return [lengths[start : start + size] for start in range(0, len(lengths), size)]

    def _mask_of(
        self, mask: torch.Tensor | None, heads: Sequence[int], query_lengths: Sequence[int]
    ) -> torch.Tensor | None:
        """Of the whole mask, the rows of this ulysses group's queries and this rank's heads; columns stay whole."""
        if mask is None:
            return None
        if mask.shape[1] > 1:
            mask = mask.narrow(1, sum(heads[: self.ulysses.index]), heads[self.ulysses.index])
        if mask.shape[2] > 1 and self.ring.size > 1:
            totals = [sum(group) for group in self._by_ring(query_lengths)]
            mask = mask.narrow(2, sum(totals[: self.ring.index]), totals[self.ring.index])
        return mask

    def _heads_for_tokens(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        groups: Sequence[int],
        heads: Sequence[int],
        query_lengths: Sequence[int],
        key_lengths: Sequence[int],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """All heads of this rank's tokens, given for this rank's heads of all tokens of its ulysses group.

        One message to each where queries and keys are of the same tokens, two where they are not.
        """
        queries = self._by_ring(query_lengths)[self.ring.index]
        keys = self._by_ring(key_lengths)[self.ring.index]
        if tuple(queries) == tuple(keys):
            q, k, v = self._exchange_heads((q, k, v), (heads, groups, groups), queries)
            return q, k, v
        (q,) = self._exchange_heads((q,), (heads,), queries)
        k, v = self._exchange_heads((k, v), (groups, groups), keys)
        return q, k, v

    def _exchange_heads(
        self, tensors: Sequence[torch.Tensor], heads: Sequence[Sequence[int]], lengths: Sequence[int]
    ) -> list[torch.Tensor]:
        """Tensors (B, all heads, tokens, D) of the same tokens to (B, own heads, all tokens, D), views of one buffer.

        `heads` has for each tensor how many every rank gets. Tokens are outermost in a message, so that what arrives
        lies as one tensor.
        """
        mine, tokens, batch = self.ulysses.index, lengths[self.ulysses.index], tensors[0].shape[0]
        # numbers a token: of each destination, of each tensor
        widths = [
            [batch * count[rank] * t.shape[3] for t, count in zip(tensors, heads, strict=True)] for rank in self._ranks
        ]
        rows = [sum(each) for each in widths]
        send = tensors[0].new_empty(tokens * sum(rows))
        starts = [0, *accumulate(tokens * row for row in rows)]
        for rank in self._ranks:
            block = send[starts[rank] : starts[rank + 1]].view(tokens, rows[rank])
            for tensor, count, part in zip(tensors, heads, block.split(widths[rank], 1), strict=True):
                given = tensor.narrow(1, sum(count[:rank]), count[rank])
                part.view(tokens, batch, count[rank], tensor.shape[3]).copy_(given.permute(2, 0, 1, 3))
        received = self.ulysses.all_to_all(
            send,
            send_lengths=tuple(tokens * row for row in rows),
            receive_lengths=tuple(length * rows[mine] for length in lengths),
        )
        parts = received.view(sum(lengths), rows[mine]).split(widths[mine], 1)
        return [
            part.unflatten(1, (batch, count[mine], tensor.shape[3])).permute(1, 2, 0, 3)
            for part, tensor, count in zip(parts, tensors, heads, strict=True)
        ]

    @property
    def _ranks(self) -> range:
        return range(self.ulysses.size)

    def _tokens_for_heads(self, out: torch.Tensor, heads: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
        """The way back: (B, own heads, all tokens, Dv) to (B, all heads, own tokens, Dv)."""
        batch, count, _, width = out.shape
        tokens = lengths[self.ulysses.index]
        send = out.permute(2, 0, 1, 3).contiguous().view(-1)  # tokens outermost
        received = self.ulysses.all_to_all(
            send,
            send_lengths=tuple(length * batch * count * width for length in lengths),
            receive_lengths=tuple(tokens * batch * each * width for each in heads),
        )
        parts = received.split([tokens * batch * each * width for each in heads])
        by_token = [
            part.view(tokens, batch, each, width).transpose(0, 1) for part, each in zip(parts, heads, strict=True)
        ]
        # (B, S, Hq, Dv) in memory, as the model flattens it next
        return torch.cat(by_token, 2).transpose(1, 2)

    def _around_the_ring(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        lengths: Sequence[int],
        mask: torch.Tensor | None,
        scale: float | None,
        common: int,
    ) -> torch.Tensor:
        """Attention over the first `common` keys, then over those of all ulysses groups, whose tokens `lengths` are, as
        they come around."""
        width, values_width = max(q.shape[-1], v.shape[-1]), v.shape[-1]
        if scale is not None or width > q.shape[-1]:  # our kernels know no scale but 1 / sqrt of the width they see
            q = q * ((q.shape[-1] ** -0.5 if scale is None else scale) * width**0.5)
        q, k, v = (F.pad(each, (0, width - each.shape[-1])) for each in (q, k, v))  # nor two widths
        queries = q.transpose(1, 2)  # the kernels' layout, (B, S, H, D)
        bias = None if mask is None else additive_mask(mask[:, 0], q.dtype).expand(-1, q.shape[2], -1)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        around = RingPass(self.ring, k[:, common:], v[:, common:], lengths=lengths)
        out = around.attend(queries, mask=bias, common=(k[:, :common], v[:, :common]), named=self.named)
        if out is None:
            return q.new_empty((*q.shape[:3], values_width))
        return out[..., :values_width].to(q.dtype).transpose(1, 2)

    def _over_all_keys(
        self,
        kernel: AttentionFunction,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        query_lengths: Sequence[int],
        key_lengths: Sequence[int],
        mask: torch.Tensor | None,
        common: int,
    ) -> torch.Tensor:
        """This rank's queries with all heads, over the first `common` keys and everybody's others, gathered."""
        here = [each[:, :, :common] for each in (k, v)]
        gathered = self.whole_keys(k[:, :, common:], v[:, :, common:], lengths=key_lengths)
        keys, values = _behind(here, gathered)
        if mask is not None and mask.shape[2] > 1:
            mask = mask.narrow(2, sum(query_lengths[: self.index]), query_lengths[self.index])
        if not q.shape[2]:
            return q.new_empty((*q.shape[:3], v.shape[-1]))
        return kernel([q, keys, values], q.shape[1], mask)


def _behind(common: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values (B, H, T, D), each behind those that all ranks have."""
    k, v = (torch.cat(each, 2) if each[0].shape[2] else each[1] for each in zip(common, others, strict=True))
    return k, v
