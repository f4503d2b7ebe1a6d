"""Ring Attention: keys and values go around the ranks of a ring, and each hop's part is merged into one softmax.

Letters: `B` batch, `S` query tokens of this rank, `T` key tokens that it holds, `H` heads of queries, `D` head size.
Source: Ring Attention (arXiv 2310.01889, section 3).

Owns the hops. Whose queries and keys go around is said by attention.py.
"""

from collections.abc import Iterable, Sequence

import torch

from ..exchange_formats import EXACT, FP8
from .collectives import AllToAll, Axis
from .kernels import merge
from .named_kernels import attend_with_lse
from .wire_format import from_fp8, to_fp8


class RingPass:
    """Keys and values on their way around a ring, once. This rank's own are sent when it is made."""

    def __init__(
        self, ring: Axis, k: torch.Tensor, v: torch.Tensor, *, lengths: Sequence[int], exchange: str = EXACT
    ) -> None:
        """k, v (B, T, H or fewer, D) are this rank's; `lengths` are the T of all ranks of the ring.

        In another `exchange` they are rounded once, before the first hop, and passed on as they came; this rank's
        queries see its own as they are.
        """
        self.ring, self.lengths = ring, lengths
        self._dtype = k.dtype if exchange == FP8 else None
        self._own = (k, v) if exchange == FP8 else None
        both = torch.stack((k, v))
        self.held = to_fp8(both) if exchange == FP8 else both.contiguous()  # (2, B, T, H, D, or as it travels)
        self.under_way = self._start_hop(0)

    def attend(
        self,
        q: torch.Tensor,
        *,
        mask: torch.Tensor | None,
        common: tuple[torch.Tensor, torch.Tensor] | None = None,
        named: str = "",
    ) -> torch.Tensor | None:
        """Attention of q (B, S, H, D) over all that come; the next hop travels while the present part is computed.

        `common`: keys and values (B, C, H or fewer, D) that every rank has, and that come first in `mask`. `named`: the
        kernel of a package that was asked for, "" for torch's.
        `mask` (B or 1, S, all tokens) is added to the scores. Returns (B, S, H, D) in fp32, None where there is
        no query or no key.
        """
        out = lse = None
        before = 0 if common is None else common[0].shape[1]
        if common is not None and before and q.shape[1]:
            columns = None if mask is None else mask[:, :, :before]
            part_out, lse = attend_with_lse(named, q, *(_repeated(each, q.shape[2]) for each in common), mask=columns)
            out = part_out.to(torch.float32, copy=True)
        for hop in range(self.ring.size):
            owner = (self.ring.index - hop) % self.ring.size
            if hop:
                self.under_way, self._own = self._start_hop(hop), None
            if q.shape[1] and self.lengths[owner]:
                start = before + sum(self.lengths[:owner])
                columns = None if mask is None else mask[:, :, start : start + self.lengths[owner]]
                held = (_repeated(each, q.shape[2]) for each in self._held_now())
                part_out, part_lse = attend_with_lse(named, q, *held, mask=columns)
                if out is None or lse is None:
                    out, lse = part_out.to(torch.float32, copy=True), part_lse
                else:
                    out, lse = merge(out, lse, part_out, part_lse)
            self._take_hop()
        return out

    def _take_hop(self) -> None:
        """Hold what is under way once it is here, and nothing any more of what was sent."""
        if self.under_way is not None:
            hop, self.under_way = self.under_way, None
            self.held = hop.wait()

    def _held_now(self) -> Iterable[torch.Tensor]:
        """The keys and the values that are held now."""
        if self._dtype is None:
            return self.held
        return from_fp8(self.held, self._dtype) if self._own is None else self._own

    def _start_hop(self, hop: int) -> AllToAll | None:
        """Send on the keys and values that are held at `hop`. None at the last."""
        if hop + 1 == self.ring.size:
            return None
        coming = self.lengths[(self.ring.index - hop - 1) % self.ring.size]
        shape = (*self.held.shape[:2], coming, *self.held.shape[3:])
        started = self.ring.start_shift(self.held, shape)
        self.ring.let_pass()
        return started


def _repeated(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """(B, T, heads of keys, D) with each head as often as it has heads of queries, for kernels that know no groups."""
    times = heads // tensor.shape[2]
    return tensor if times == 1 else tensor.repeat_interleave(times, 2)
