"""Calls of a hosted model whose blocks a step cache may skip: who decides together, and what is counted.

Does not own how blocks are skipped (models/hosted/first_block.py) nor what is kept of a call (pipelined_step.py).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ..models.hosted.first_block import CachedBlocks, Residuals, Total
from ..models.specs import spec_of
from ..parallel.attention import SequenceParallelAttention
from ..parallel.collectives import Axis
from ..wire.replies import CachedCalls

if TYPE_CHECKING:
    from .hosted import HostedForward, HostedModel


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

    Arguments as those of `HostedForward.call`; `counts`: the call counts for this rank. To be called before the
    module is shared (`HostedModel.under`).
    """
    model, sharing = forward.model, [sequence]
    if over is not None:
        sharing.append(SequenceParallelAttention(ulysses=over))

    cached, threshold, total = cached_blocks(model), float(options["step_cache"]), total_over(sharing)

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


def cached_blocks(model: "HostedModel") -> CachedBlocks:
    """The blocks as a step cache skips them, hooked when that is first asked for."""
    if model.skipping is None:
        for shared in reversed(model.sharings):  # their hooks go around those of the cache
            shared.remove()
        model.sharings.clear()
        model.shared = model.between = None
        model.skipping = CachedBlocks(model.module, spec_of(type(model.module)))
    return model.skipping
