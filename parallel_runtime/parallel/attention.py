"""Sequence parallel attention for any model: uneven and grouped heads, unequal lengths, masks, any attention function.

Letters: `B` batch, `Hq` and `Hk` heads of queries and of keys, `S` query tokens and `T` key tokens of this rank, `D`
and `Dv` sizes of a head of keys and of values, `U` ulysses degree, `R` ring degree. Sources: DeepSpeed-Ulysses (arXiv
2309.14509), Ring Attention (arXiv 2310.01889), USP (arXiv 2405.07719), PipeFusion (arXiv 2405.14430).

Ulysses shares out heads by whole groups (a head of keys with its heads of queries), the first ranks one more where they
do not come out even. They go in chunks where that hides the exchange behind attention (overlap.py). Around the ring
keys and values travel from rank to rank (ring.py). Where there are fewer groups than ranks, where a mask differs by
head under Ring, or where keys are so few that less than half is sent, every rank gets all keys and values, and attends
with its own queries. Keys may be kept from call to call (kept_keys.py): then every rank of a ring gets the new ones of
all, and keeps them.

Owns when what is exchanged for a call. Does not own which rank computes which heads nor how messages are laid out
(head_chunks.py), which tokens a rank has, nor the function that computes attention: a model brings its own. Ring alone
uses the kernels of this project, which return the log-sum-exp.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import torch
import torch.nn.functional as F

from ..exchange_formats import EXACT, FP8, wire_bytes
from .collectives import Axis
from .head_chunks import HeadsBack, HeadsOut, cut_groups
from .kept_keys import KeptKeys
from .kernels import additive_mask, one_row
from .named_kernels import may_attend
from .overlap import FEWER, SharedHeads
from .ring import RingPass
from .shard import split_lengths
from .wire_format import from_fp8, to_fp8

# q (B, heads, S, D), k and v (B, heads of keys, T, D). The function that is given the list empties it, so that no
# tensor is held that was sent away, or that the kernel does not need any more.
QKV: TypeAlias = list[torch.Tensor]
# Those, heads of q, a mask or None; returns (B, heads, S, Dv).
AttentionFunction: TypeAlias = Callable[[QKV, int, torch.Tensor | None], torch.Tensor]


class SequenceParallelAttention:
    """Attention over tokens spread over `ring` x `ulysses` ranks, ulysses the inner axis; one left out has one rank.

    `whole` is the axis of all of them; without it, tokens of all ranks are gathered over one axis after the other.
    `chunks` chooses into how many chunks the heads of a call are sent, alike on all ranks; None: into one. `shares` are
    those of the ring's ranks and of the ulysses ranks, each () for equal ones: of heads, and of tokens (`self.shares`,
    by part).
    """

    def __init__(
        self,
        *,
        ring: Axis | None = None,
        ulysses: Axis | None = None,
        whole: Axis | None = None,
        chunks: Callable[[SharedHeads], int] | None = None,
        shares: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
    ) -> None:
        self.ring, self.ulysses = ring or Axis("ring"), ulysses or Axis("ulysses")
        self.chunks = chunks
        of_ring, self._of_heads = shares
        self.shares = (
            tuple(
                outer * inner
                for outer in of_ring or (1,) * self.ring.size
                for inner in self._of_heads or (1,) * self.ulysses.size
            )
            if of_ring or self._of_heads
            else ()
        )
        self.whole = whole
        self.parts = self.ring.size * self.ulysses.size
        self.index = self.ring.index * self.ulysses.size + self.ulysses.index
        self.most_keys = 0  # of one attention call; a proof of the plan asks for it
        self.named = ""  # the kernel of a package that was asked for (named_kernels.py)
        self.exchange = EXACT  # as what heads and keys travel (exchange_formats.py)
        self.rounded = False  # whether any did in another format since this was set

    def gather(self, tensor: torch.Tensor, *, dim: int, lengths: Sequence[int]) -> torch.Tensor:
        """The tensors of all parts as one along `dim`, in part order; `lengths` has how long each part's is there.

        Any dtype. Short parts are sent as long as the longest one.
        """
        if self.whole is not None:
            return _gathered(self.whole, tensor, dim, lengths)
        groups = self._by_ring(lengths)
        rows = _gathered(self.ulysses, tensor, dim, groups[self.ring.index])
        return _gathered(self.ring, rows, dim, [sum(group) for group in groups])

    def maximum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The largest over all parts of each number of `tensor`."""
        for axis in (self.ulysses, self.ring) if self.whole is None else (self.whole,):
            tensor = axis.maximum(tensor) if axis.size > 1 else tensor
        return tensor

    def whole_keys(
        self, k: torch.Tensor, v: torch.Tensor, *, lengths: Sequence[int], exact: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys (B, Hk, T, D) and values (B, Hk, T, Dv) of all parts, in part order; one message to each."""
        return _both(partial(self.gather, dim=2, lengths=lengths), k, v, self._exchange_of(exact=exact))

    def attend(
        self,
        kernel: AttentionFunction,
        qkv: QKV,
        *,
        query_lengths: Sequence[int],
        key_lengths: Sequence[int],
        mask: torch.Tensor | None = None,
        scale: float | None = None,
        each_head_alone: bool = True,
        exact: bool = False,
        common: int = 0,
        kept: KeptKeys | None = None,
    ) -> torch.Tensor:
        """Attention of this rank's queries over the keys of all ranks.

        `qkv`, which is emptied: q (B, Hq, S, D), k (B, Hk, T, D), v (B, Hk, T, Dv) of this rank, Hq a multiple of Hk;
        the lengths are the S and the T of every part, in part order; `mask` (B or 1, Hq or 1, all queries or 1, all
        keys), bool or added to the scores, with tokens in part order. `scale`, 1 / sqrt(D) by default, must be the one
        that `kernel` uses. `each_head_alone`: what `kernel` makes of a head does not depend on the other heads that it
        is given; else it is given all of a rank's at once. The ranks of a machine say the same of it, those of several
        may not: Ring, which alone goes from machine to machine, does not ask. `exact`: no kernel that rounds may take
        its place, and heads travel as they are. `common`: so many keys, before the T, are the same on every rank. They
        are not sent, and come before all others in `mask`. `kept`: these keys are kept, and queries see all that are
        kept; columns of `mask` are in the order of those, or with `kept.fresh` of these; `common` is 0 then. Returns
        (B, Hq, S, Dv).
        """
        if self.parts == 1 and kept is None:
            return kernel(qkv, qkv[0].shape[1], mask)
        hops = self.ring.size > 1 and kept is None
        by_head, groups = mask is not None and mask.shape[1] > 1, qkv[1].shape[1]
        exchange = self._exchange_of(exact=exact)
        few_keys = kept is None and self.sends_less_as_keys(qkv[0].shape[1] // groups, query_lengths, key_lengths)
        if groups < self.ulysses.size or (by_head and hops) or few_keys:
            return self._over_all_keys(kernel, qkv, query_lengths, key_lengths, mask, common, kept, exact)
        totals = [sum(group) for group in self._by_ring(key_lengths)]
        attend = partial(self._attend_here, kernel, lengths=totals, kept=kept, exchange=exchange)
        if hops:
            attend = partial(self._around_the_ring, lengths=totals, scale=scale, exact=exact, common=common)
        mask = self._rows_of(mask, query_lengths)
        if self.ulysses.size == 1:
            return attend(qkv, mask)
        # in one chunk where keys are kept: calls of other lengths must find them
        alone = (each_head_alone or hops) and kept is None  # under Ring our kernels attend, in `kernel`'s place
        chunks = self._chunks(qkv, query_lengths, key_lengths, common, exchange) if alone else 1
        lengths = {"query_lengths": query_lengths, "key_lengths": key_lengths}
        return self._over_heads(attend, qkv, chunks=chunks, **lengths, mask=mask, common=common, exchange=exchange)

    def _attend_here(
        self,
        kernel: AttentionFunction,
        qkv: QKV,
        mask: torch.Tensor | None,
        *,
        lengths: Sequence[int],
        kept: KeptKeys | None,
        exchange: str,
    ) -> torch.Tensor:
        """Attention of this ulysses group's queries over its keys; where keys are kept, over those of all groups, whose
        tokens `lengths` are."""
        if kept is not None:
            q, k, v = qkv
            qkv.clear()
            if self.ring.size > 1:
                k, v = _both(partial(_gathered, self.ring, dim=2, lengths=lengths), k, v, exchange)
            qkv += (q, *kept.seen(k, v))
            del q, k, v
        return _attended(kernel, qkv, mask)

    def sends_less_as_keys(self, heads_a_group: int, query_lengths: Sequence[int], key_lengths: Sequence[int]) -> bool:
        """Whether ranks send so much less where each gets all keys and values than where they share out heads.

        Counted in tokens of a group of heads, `heads_a_group` of queries, that all ranks send. Less than half of them:
        heads may travel in chunks behind attention, and these keys travel before it.
        """
        queries, keys, ulysses = sum(query_lengths), sum(key_lengths), self.ulysses.size
        if ulysses == 1 or keys >= queries:
            return False
        as_keys = self.parts * (self.parts - 1) * max(key_lengths)
        as_heads = (heads_a_group * queries + keys) * (ulysses - 1) / ulysses + (self.ring.size - 1) * keys
        return FEWER * as_keys < as_heads

    def _exchange_of(self, *, exact: bool) -> str:
        """As what a call's heads travel, where they do; `exact`: its model forbids rounding."""
        exchange = EXACT if exact or self.parts == 1 else self.exchange
        self.rounded |= exchange != EXACT
        return exchange

    def _by_ring(self, lengths: Sequence[int]) -> list[Sequence[int]]:
        """The lengths of the parts of each ulysses group, in the order of the ring."""
        size = self.ulysses.size
        return [lengths[start : start + size] for start in range(0, len(lengths), size)]

    def _rows_of(self, mask: torch.Tensor | None, query_lengths: Sequence[int]) -> torch.Tensor | None:
        """Of the whole mask, the rows of this ulysses group's queries; heads and columns stay whole."""
        if mask is not None and mask.shape[2] > 1 and self.ring.size > 1:
            totals = [sum(group) for group in self._by_ring(query_lengths)]
            mask = mask.narrow(2, sum(totals[: self.ring.index]), totals[self.ring.index])
        return mask

    def _over_heads(
        self,
        attend: Callable[[QKV, torch.Tensor | None], torch.Tensor],
        qkv: QKV,
        *,
        chunks: int,
        query_lengths: Sequence[int],
        key_lengths: Sequence[int],
        mask: torch.Tensor | None,
        common: int,
        exchange: str,
    ) -> torch.Tensor:
        """All heads of this rank's tokens, given for this rank's heads of all tokens of its ulysses group, and back.

        While a chunk of the heads is attended to, the next one is on its way here, and the one before on its way back.
        A chunk is one message to each where queries and keys are of the same tokens, two where they are not.
        """
        groups, queries_a_group = qkv[1].shape[1], qkv[0].shape[1] // qkv[1].shape[1]
        cut = cut_groups(groups, self.ulysses.size, chunks, self._of_heads)
        queries, keys = (self._by_ring(lengths)[self.ring.index] for lengths in (query_lengths, key_lengths))
        here = [each[:, :, :common].clone() for each in qkv[1:]] if common else []
        sent = [qkv[0], *(each[:, :, common:] for each in qkv[1:])]
        qkv.clear()
        dtype = sent[0].dtype
        if exchange == FP8:
            sent = [to_fp8(each) for each in sent]
        whole = [sent] if tuple(queries) == tuple(keys) else [sent[:1], sent[1:]]
        del sent
        out_there = [
            HeadsOut(self.ulysses, whole.pop(0), cut=cut, groups=groups, lengths=lengths)
            for lengths in (queries, keys)[: len(whole)]
        ]
        heads = [tuple(count * queries_a_group for count in counts) for counts in cut]
        back, done = HeadsBack(self.ulysses, cut=heads, lengths=queries), list[torch.Tensor]()
        for chunk in range(chunks):
            arrived = [each for tensors in out_there for each in tensors.take(chunk)]
            if chunk + 1 < chunks:
                for tensors in out_there:
                    tensors.start(chunk + 1)
            if exchange == FP8:
                arrived = [from_fp8(each, dtype) for each in arrived]
            if done:
                back.start(chunk - 1, done.pop())
            before, mine = sum(cut[chunk][: self.ulysses.index]), cut[chunk][self.ulysses.index]
            first = sum(map(sum, cut[:chunk])) + before
            if here:
                arrived[1:] = _behind([each.narrow(1, first, mine) for each in here], arrived[1:])
            of_heads = mask
            if mask is not None and mask.shape[1] > 1:
                of_heads = mask.narrow(1, first * queries_a_group, mine * queries_a_group)
            if chunks > 1:
                self.ulysses.let_pass()
            out = attend(arrived, of_heads)
            done.append(to_fp8(out) if exchange == FP8 else out)
        out = back.finish(done.pop())
        return from_fp8(out, dtype) if exchange == FP8 else out

    def _chunks(
        self, qkv: QKV, query_lengths: Sequence[int], key_lengths: Sequence[int], common: int, exchange: str
    ) -> int:
        """Into how many chunks the heads of this call are sent. What all ranks know decides, so all say the same."""
        if self.chunks is None:
            return 1
        (batch, heads, _, head_dim), groups, values_dim = qkv[0].shape, qkv[1].shape[1], qkv[2].shape[3]
        size, element_bytes = self.ulysses.size, qkv[0].element_size()
        of_ranks = split_lengths(groups, size, self._of_heads, least=1)
        heads_here = max(of_ranks) * (heads // groups)
        sent = batch * wire_bytes(head_dim, element_bytes, exchange) * (size - 1) / size
        queries, keys = max(sum(group) for group in self._by_ring(query_lengths)), common + sum(key_lengths)
        shared = SharedHeads(
            groups=groups,
            ranks=size,
            keys=keys,
            head_dim=head_dim,
            flops=2.0 * batch * heads_here * queries * keys * (head_dim + values_dim),
            arriving_bytes=sent
            * (max(query_lengths) * heads * head_dim + max(key_lengths) * groups * (head_dim + values_dim)),
            returning_bytes=sent * max(query_lengths) * heads * values_dim,
        )
        return min(self.chunks(shared), *of_ranks)

    def _around_the_ring(
        self,
        qkv: QKV,
        mask: torch.Tensor | None,
        *,
        lengths: Sequence[int],
        scale: float | None,
        exact: bool,
        common: int,
    ) -> torch.Tensor:
        """Attention over the first `common` keys, then over those of all ulysses groups, whose tokens `lengths` are, as
        they come around."""
        q, k, v = qkv
        qkv.clear()
        if self.ulysses.size > 1 and q.untyped_storage().nbytes() > q.nbytes:
            q = q.clone()  # a view of the buffer in which keys arrived too would hold it over all hops
        width, values_width = max(q.shape[-1], v.shape[-1]), v.shape[-1]
        if scale is not None or width > q.shape[-1]:  # our kernels know no scale but 1 / sqrt of the width they see
            q = q * ((q.shape[-1] ** -0.5 if scale is None else scale) * width**0.5)
        # nor two widths, nor numbers of a head apart; `pad` copies where there is nothing to add, too
        q, k, v = (
            F.pad(each, (0, width - each.shape[-1])) if each.shape[-1] < width or each.stride(-1) != 1 else each
            for each in (q, k, v)
        )
        queries = q.transpose(1, 2)  # the kernels' layout, (B, S, H, D)
        # One mask for all heads: `attend` has others attended to over all keys.
        bias = None if mask is None else additive_mask(one_row(mask[:, 0]), q.dtype).expand(-1, q.shape[2], -1)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        exchange = self._exchange_of(exact=exact)
        before = (k[:, :common].clone(), v[:, :common].clone()) if common else None  # views would hold all
        around = RingPass(self.ring, k[:, common:], v[:, common:], lengths=lengths, exchange=exchange)
        del k, v  # a copy of them goes around
        named = self.named if self.named and may_attend(self.named, exact=exact) else ""
        out = around.attend(queries, mask=bias, common=before, named=named)
        if out is None:
            return q.new_empty((*q.shape[:3], values_width))
        return out[..., :values_width].to(q.dtype).transpose(1, 2)

    def _over_all_keys(
        self,
        kernel: AttentionFunction,
        qkv: QKV,
        query_lengths: Sequence[int],
        key_lengths: Sequence[int],
        mask: torch.Tensor | None,
        common: int,
        kept: KeptKeys | None,
        exact: bool,
    ) -> torch.Tensor:
        """This rank's queries with all heads, over the first `common` keys and the others of all ranks, gathered."""
        q, k, v = qkv
        qkv.clear()
        others = self.whole_keys(k[:, :, common:], v[:, :, common:], lengths=key_lengths, exact=exact)
        seen = _behind([each[:, :, :common] for each in (k, v)], others)
        del k, v, others
        qkv += (q, *(seen if kept is None else kept.seen(*seen)))
        del q, seen
        if mask is not None and mask.shape[2] > 1:
            mask = mask.narrow(2, sum(query_lengths[: self.index]), query_lengths[self.index])
        return _attended(kernel, qkv, mask)


def _attended(kernel: AttentionFunction, qkv: QKV, mask: torch.Tensor | None) -> torch.Tensor:
    """What `kernel` returns; without queries it is not called."""
    if qkv[0].shape[2]:
        return kernel(qkv, qkv[0].shape[1], mask)
    q, _, v = qkv
    qkv.clear()
    return q.new_empty((*q.shape[:3], v.shape[-1]))


def _both(
    gather: Callable[[torch.Tensor], torch.Tensor], k: torch.Tensor, v: torch.Tensor, exchange: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys (B, H, T, D) and values (B, H, T, Dv) of all ranks, side by side in one message of `exchange`."""
    sent = [to_fp8(each) for each in (k, v)] if exchange == FP8 else [k, v]
    by_token = torch.cat([each.movedim(2, 0) for each in sent], 3)  # so they are gathered without a copy
    keys, values = gather(by_token.movedim(0, 2)).split([each.shape[-1] for each in sent], 3)
    return (from_fp8(keys, k.dtype), from_fp8(values, v.dtype)) if exchange == FP8 else (keys, values)


def _gathered(axis: Axis, tensor: torch.Tensor, dim: int, lengths: Sequence[int]) -> torch.Tensor:
    """The tensors of all ranks of an axis as one along `dim`, in their order. Parts of one length are sent and returned
    where they lie, if a tensor has `dim` outermost in memory; short ones are sent as long as the longest."""
    if axis.size == 1:
        return tensor
    mine = tensor.movedim(dim, 0).contiguous()
    row = mine.shape[1:]
    row_bytes = row.numel() * mine.element_size()
    room = max(lengths) * row_bytes
    if room == 0:
        return tensor
    equal = min(lengths) == max(lengths)
    if equal:
        send = mine.view(-1).view(torch.uint8)
    else:
        send = torch.empty(room, dtype=torch.uint8, device=mine.device)
        send[: mine.nbytes] = mine.view(-1).view(torch.uint8) if mine.numel() else send[:0]
    received = torch.empty(axis.size * room, dtype=torch.uint8, device=mine.device)
    axis.all_gather(send, received)
    if equal:
        return received.view(mine.dtype).view(sum(lengths), *row).movedim(0, dim)
    parts = [
        received[part * room : part * room + length * row_bytes].view(mine.dtype).view(length, *row)
        for part, length in enumerate(lengths)
    ]
    return torch.cat(parts).movedim(0, dim)


def _behind(common: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values (B, H, T, D), each behind those that all ranks have."""
    k, v = (torch.cat(each, 2) if each[0].shape[2] else each[1] for each in zip(common, others, strict=True))
    return k, v
