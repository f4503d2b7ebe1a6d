"""Whole sampling runs with ComfyUI's EasyCache or LazyCache: which rows decide, and what was skipped.

Does not own the arithmetic (stock_caches.py), nor what stands for the model's output in a skipped call (latent.py).
"""

from collections.abc import Sequence

import torch

from ..models.hosted.first_block import total_over
from ..parallel.attention import SequenceParallelAttention
from ..stock_caches import SkipDecision, StockCache
from .latent import LatentRows
from .mesh import Mesh


class SkippedCalls:
    """Which calls of a run are skipped: one answer on all ranks of `mesh` that share the run's rows.

    `rows` are this rank's, entered.
    """

    def __init__(self, cache: StockCache, rows: Sequence[LatentRows], *, mesh: Mesh, device: torch.device) -> None:
        self._rows = rows
        total = total_over([mesh.attention, SequenceParallelAttention(ulysses=mesh.axes["cfg"])])
        self._decision = SkipDecision(cache, lambda sums: total(sums.to(device)))

    @property
    def count(self) -> int:
        """How many were skipped so far."""
        return self._decision.skipped

    def skips(self, call: int) -> bool:
        """Whether the call that all rows have entered is skipped; `LatentRows.skip` then stands for `finish_call`.

        Collective, where it depends on numbers.
        """
        kept = [(rows.cached, rows.seen) for rows in self._rows if rows.cached is not None]
        return self._decision.skips(call, kept)
