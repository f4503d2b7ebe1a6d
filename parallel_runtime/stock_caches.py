"""ComfyUI's EasyCache and LazyCache over rows of a latent that several ranks share.

Letters: `B` images, `S` rows of a latent, `C` numbers of a row.

    EasyCache   around the model: goes in the scaled latent, comes out the model's output, of each side of cfg
    LazyCache   around cfg: goes in the latent, comes out the denoised latent

Each call, the change of what goes in since the last computed call, times how much what came out had changed by that
before, estimates how much what comes out would change. While the sum of the estimates stays below the threshold the
model is not called: what it had added to what went in is added again. Source: EasyCache (arXiv 2507.02860), in the
form of ComfyUI's comfy_extras/nodes_easycache.py. Means are of all ranks' rows, so all ranks decide the same.

Owns the arithmetic and what is kept. Does not own which ComfyUI computes the same
(nodes/host/sampling/stock_caches.py), nor where in a run it stands (worker/latent.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

COMPUTE, NOTE, MAY_SKIP = "-", "n", "m"  # of a call: nothing; keep what comes out; skip it if that may be
COMPARED = 64  # of so many numbers one is, in ComfyUI
LOOKED_AT = "cache.looked_at"  # among a request's tensors: (1, S, C), true where a number is compared
Total = Callable[[Tensor], Tensor]  # sums of this rank to those of all ranks that share the run


@dataclass(frozen=True, kw_only=True)
class StockCache:
    """A cache of a run. `calls`: a letter for each call of the model.

    `dtype`: of what goes in and comes out. The rest is EasyCache's: `first`: the side whose rows are compared;
    `together`: the model is called with both sides at once, whose outputs count alike; `overwrites`: a call that is
    skipped leaves its result in the latent too, from which ComfyUI then makes the denoised latent.
    """

    easy: bool
    threshold: float
    calls: str
    dtype: str = "float32"
    first: int = 0
    together: bool = False
    overwrites: bool = False

    def __post_init__(self) -> None:
        if set(self.calls) - {COMPUTE, NOTE, MAY_SKIP}:
            raise ValueError(f"calls {self.calls!r} of a step cache; use {COMPUTE!r}, {NOTE!r} and {MAY_SKIP!r}")


def cached_rows_bytes(numbers: int) -> int:
    """What `CachedRows` keeps of latents of so many numbers, sides included, in fp32: what was added to each, and each
    64th of what went in and came out."""
    return 4 * (numbers + 2 * -(-numbers // COMPARED))


class CachedRows:
    """What one rank keeps of its rows; of each of `sides` what the model added, and numbers that are compared."""

    def __init__(self, cache: StockCache, looked_at: Tensor, *, sides: Sequence[int], counts: bool = True) -> None:
        """`looked_at` (S, C); `sides` that come out here, of LazyCache (0,); `counts`: not also on another rank."""
        self.cache, self._sides, self._counts = cache, tuple(sides), counts and cache.first in sides
        self._norm_counts = counts
        self._index, self._dtype = looked_at.flatten().nonzero().squeeze(1), getattr(torch, cache.dtype)
        self._before: Tensor | None = None  # (B, numbers) that went in
        self._out_before: Tensor | None = None
        self._added: list[Tensor] = []
        self.noted = torch.zeros(4, dtype=torch.float64)  # change of what came out and its size, as sums and numbers

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        kept = [*self._added, *(each for each in (self._before, self._out_before) if each is not None)]
        return sum(each.nbytes for each in kept)

    def change(self, x: Tensor) -> Tensor:
        """How much `x` (B, S, C) differs from what went in when it was noted: (sum, numbers)."""
        if not self._counts or self._before is None:
            return torch.zeros(2, dtype=torch.float64)
        return _sums(self._compared(x.to(self._dtype)) - self._before)

    def drop(self) -> None:
        """Keep nothing of what the model added: the call that is computed now replaces it."""
        self._added = []

    def again(self, x: Tensor) -> list[Tensor]:
        """What comes out of a call that is skipped, fp32, for each side."""
        return [(x.to(self._dtype) + added).float() for added in self._added]

    def note(self, call: int, x: Tensor, outs: Sequence[Tensor]) -> None:
        """Keep what a computed call makes of `x`, one of `outs` a side."""
        if self.cache.calls[call] == COMPUTE:
            return
        x, outs = x.to(self._dtype), [out.to(self._dtype) for out in outs]
        self._added = [out - x for out in outs]
        self.noted = torch.zeros(4, dtype=torch.float64)
        if self._counts:
            first, before = self._compared(outs[self._sides.index(self.cache.first)]), self._out_before
            if before is not None:
                self.noted[:2] = _sums(first - before)
            self._before, self._out_before = self._compared(x), first
        for side, out in zip(self._sides, outs, strict=True) if self._norm_counts else ():
            if self.cache.together or side == self.cache.first:
                self.noted[2:] += _sums(out)

    def _compared(self, x: Tensor) -> Tensor:
        return x.flatten(1)[:, self._index]


class SkipDecision:
    """Which calls of a run are skipped. `total` may be collective: it is asked of the same calls on all ranks."""

    def __init__(self, cache: StockCache, total: Total) -> None:
        self.cache, self._total, self._dtype = cache, total, getattr(torch, cache.dtype)
        self.skipped = 0
        self._noted = self._fresh = False  # whether any call was, and one since numbers were summed up
        self._cumulative: Tensor | float = 0.0
        self._change: Tensor | None = None
        self._rate: Tensor | None = None
        self._size = torch.zeros(())

    def skips(self, call: int, rows: CachedRows, x: Tensor) -> bool:
        """Whether a call is skipped. `rows` are those of this rank, `x` what goes in (B, S, C).

        Of a call that is computed nothing older is kept from here on.
        """
        letter = self.cache.calls[call]
        skips = letter != COMPUTE and self._decide(letter, rows, x)
        if not skips and (letter != COMPUTE or MAY_SKIP not in self.cache.calls[call:]):
            rows.drop()
        self.skipped += skips
        return skips

    def _decide(self, letter: str, rows: CachedRows, x: Tensor) -> bool:
        if not self._noted:
            self._noted = self._fresh = True
            return False
        sums = torch.zeros(6, dtype=torch.float64)
        if letter == MAY_SKIP:
            sums[:2] += rows.change(x)
        sums[2:] += rows.noted
        sums = self._total(sums).cpu()
        if self._fresh:
            self._settle(sums[2:])
        self._change = self._mean(sums[:2]) if letter == MAY_SKIP else None
        if self._change is not None and self._rate is not None:
            self._cumulative = self._cumulative + (self._rate * self._change) / self._size
            if self._cumulative < self.cache.threshold:
                return True
            self._cumulative = 0.0
        self._fresh = True
        return False

    def _settle(self, noted: Tensor) -> None:
        """Take in what the last computed call noted."""
        if noted[1] and self._change is not None:
            self._rate = self._mean(noted[:2]) / self._change
        self._size, self._fresh = self._mean(noted[2:]), False

    def _mean(self, sums: Tensor) -> Tensor:
        return (sums[0] / sums[1]).to(self._dtype)


def _sums(numbers: Tensor) -> Tensor:
    """(sum of absolute values, how many), on the host."""
    return torch.tensor([float(numbers.abs().sum(dtype=torch.float64)), numbers.numel()], dtype=torch.float64)
