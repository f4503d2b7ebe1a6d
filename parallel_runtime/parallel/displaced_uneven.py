"""Attention of a chunk over the keys of all tokens, for any model: `attention.py` with keys kept between calls.

Letters: `B` batch, `H` heads, `S` tokens of the chunk on this rank, `T` those of all its ranks, `A` tokens of all
chunks, `D` head size, `U` ulysses degree. Source and exchange as in `displaced.py`, which does the same for a model
whose blocks are written for it: ulysses exchanges heads against tokens, around the ring the chunk's fresh keys alone
travel, and every ring rank keeps all of them. Where there are fewer heads of keys than U, every rank keeps all heads.

Owns who keeps which heads. Does not own where a chunk's tokens stand among all (models/hosted/pass_call.py).
"""

from collections.abc import Sequence

import torch

from .attention import QKV, AttentionFunction, SequenceParallelAttention
from .collectives import Axis


class HeldRows:
    """Tensors by name, kept from call to call: of each, rows of the chunk that runs are new, the others older."""

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        self.dtypes: tuple[torch.dtype, ...] = ()  # of what comes from the stage before

    def put(self, name: str, rows: torch.Tensor, places: torch.Tensor | slice, *, dim: int, total: int) -> torch.Tensor:
        """Keep `rows` at `places` of `total` along `dim`; returns all there are."""
        held = self._tensors.get(name)
        if held is None:
            held = self._tensors[name] = rows.new_zeros((*rows.shape[:dim], total, *rows.shape[dim + 1 :]))
        held[(slice(None),) * dim + (places,)] = rows
        return held

    def get(self, name: str) -> torch.Tensor:
        """One that was put."""
        return self._tensors[name]

    def count(self, prefix: str) -> int:
        """How many tensors have names that begin so."""
        return sum(name.startswith(prefix) for name in self._tensors)

    @property
    def num_bytes(self) -> int:
        """Bytes of all of them."""
        return sum(tensor.nbytes for tensor in self._tensors.values())


class DisplacedUneven(SequenceParallelAttention):
    """`attend_held` over a chunk that `ring` x `ulysses` ranks share. There need be no group of all of them."""

    def __init__(self, *, ring: Axis, ulysses: Axis) -> None:
        super().__init__(ring=ring, ulysses=ulysses)
        self._inner = SequenceParallelAttention(ring=Axis("ring"), ulysses=ulysses)
        self._outer = SequenceParallelAttention(ring=ring, ulysses=Axis("ulysses"))

    def gather(self, tensor: torch.Tensor, *, dim: int, lengths: Sequence[int]) -> torch.Tensor:
        """As `SequenceParallelAttention.gather`, over one axis after the other."""
        groups = self._by_ring(lengths)
        rows = self._inner.gather(tensor, dim=dim, lengths=groups[self.ring.index])
        return self._outer.gather(rows, dim=dim, lengths=[sum(group) for group in groups])

    def attend_held(
        self,
        kernel: AttentionFunction,
        qkv: QKV,
        *,
        query_lengths: Sequence[int],
        key_lengths: Sequence[int],
        mask: torch.Tensor | None,
        held: HeldRows,
        site: str,
        places: torch.Tensor | slice,
        total: int,
        fresh: bool,
    ) -> torch.Tensor:
        """Keep this chunk's keys and values as `site`, at `places` of `total`, and attend with its queries to all.

        Arguments as `attend`, of the ranks that share the chunk; rows of `mask` are the chunk's. With `fresh` the chunk
        is all there is: its keys are attended to as they came, and columns of `mask` are those; else those of the mask
        are in the order of what is kept.
        """
        by_heads = 1 < self.ulysses.size <= qkv[1].shape[1]

        def attend(qkv: QKV, mask: torch.Tensor | None) -> torch.Tensor:
            q, k, v = qkv
            qkv.clear()
            if self.parts > 1:
                k, v = self._all_keys(k, v, key_lengths, by_heads=by_heads)
            keys = held.put(f"{site}.k", k, places, dim=2, total=total)
            values = held.put(f"{site}.v", v, places, dim=2, total=total)
            if fresh:
                keys, values = k, v
            if not q.shape[2]:
                return q.new_empty((*q.shape[:3], v.shape[-1]))
            qkv += (q, keys, values)
            return kernel(qkv, q.shape[1], mask)

        if by_heads:  # in one chunk: what is kept of a call must be found by calls of other lengths
            mask = self._rows_of(mask, query_lengths)
            return self._over_heads(
                attend, qkv, chunks=1, query_lengths=query_lengths, key_lengths=key_lengths, mask=mask
            )
        if mask is not None and mask.shape[2] > 1:
            mask = mask.narrow(2, sum(query_lengths[: self.index]), query_lengths[self.index])
        return attend(qkv, mask)

    def _all_keys(
        self, k: torch.Tensor, v: torch.Tensor, key_lengths: Sequence[int], *, by_heads: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The chunk's keys and values (B, H, T, D) of all ranks, in part order; this ulysses group's are here already
        where heads were exchanged."""
        both = torch.cat((k, v), 3)
        if by_heads:
            both = self._outer.gather(both, dim=2, lengths=[sum(group) for group in self._by_ring(key_lengths)])
        else:
            both = self.gather(both, dim=2, lengths=key_lengths)
        keys, values = both.split((k.shape[-1], v.shape[-1]), 3)
        return keys, values
