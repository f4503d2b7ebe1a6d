"""Calls of a hosted model whose blocks a step cache may skip: which ranks decide together, and what is counted.

Does not own how blocks are skipped (models/hosted/first_block.py) nor what is kept of a call (held_state.py).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ..models.hosted.first_block import Residuals, Total
from ..parallel.attention import SequenceParallelAttention
from ..parallel.collectives import Axis
from ..wire.replies import CachedCalls

if TYPE_CHECKING:
    from .hosted import HostedForward


def skipping_blocks(
    forward: "HostedForward",
    residuals: Residuals,
    options: Mapping[str, Any],
    *,
    sequence: SequenceParallelAttention,
    over: Axis | None,
    counts: bool = True,
) -> AbstractContextManager[None]:
    """Around a call: its blocks but the first are skipped where that changed little, on all ranks of the call.

    Arguments as those of `HostedForward.call`; `counts`: the call counts for this rank.
    """
    model, sharing = forward.model, [sequence]
    if over is not None:
        sharing.append(SequenceParallelAttention(ulysses=over))

    cached, threshold, total = model.cached_blocks, float(options["step_cache"]), total_over(sharing)

    @contextmanager
    def skipping() -> Iterator[None]:
        with cached.calling(residuals, threshold=threshold, total=total, call_of=lambda: model.token_call) as seen:
            yield
        if counts:
            before = forward.cached or CachedCalls(calls=0, skipped=0)
            kept_bytes = max(before.kept_bytes, residuals.nbytes)
            forward.cached = CachedCalls(
                calls=before.calls + 1, skipped=before.skipped + seen.skips, kept_bytes=kept_bytes
            )

    return skipping()


def total_over(sharing: Sequence[SequenceParallelAttention]) -> Total:
    """What sums up numbers over all ranks of these groups, in the order of ranks and on the CPU.

    Devices of two kinds may add in another order, and ranks that decide apart wait for each other for ever.
    """

    def total(sums: torch.Tensor) -> torch.Tensor:
        for group in sharing:
            sums = group.gather(sums[None], dim=0, lengths=[1] * group.parts).cpu().sum(0).to(sums.device)
        return sums

    return total
