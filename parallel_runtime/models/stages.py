"""Which of a model's blocks the stages of a pipeline run, and which weights they need for it.

Every rank, asked the same, finds the same: the cut depends on the model alone.
"""

from collections.abc import Iterable, Sequence

from ..parallel.pipefusion import balanced_stages
from .base import Adapter, Block


def stage_blocks(adapter: Adapter, *, stages: int, stage: int) -> tuple[Block, ...]:
    """The blocks of one stage, contiguous, cut by counted cost. Raises `ValueError` for more stages than blocks."""
    run = stage_run([adapter.block_cost(block) for block in adapter.blocks], stages=stages, stage=stage)
    return adapter.blocks[run.start : run.stop]


def stage_run(costs: Sequence[float], *, stages: int, stage: int) -> range:
    """As `stage_blocks`, the numbers of its blocks, for blocks of these costs."""
    return balanced_stages(costs, stages)[stage]


def stage_weights(adapter: Adapter, names: Iterable[str], *, stages: int, stage: int) -> set[str]:
    """Of the model's weights, by canonical name, those that a stage needs. All of them where there is one stage."""
    blocks = tuple(block.prefix for block in stage_blocks(adapter, stages=stages, stage=stage))
    unneeded = adapter.outside_of_other_stages(first=stage == 0, last=stage == stages - 1)
    return {
        name for name in names if name.startswith(blocks) or not name.startswith((*adapter.block_prefixes, *unneeded))
    }
