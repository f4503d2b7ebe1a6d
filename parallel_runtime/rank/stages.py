"""Which of a model's blocks the stages of a pipeline run. Every rank, asked the same, finds the same."""

from ..adapters.flux import Block, FluxAdapter
from ..strategies.pipefusion import balanced_stages


def stage_blocks(adapter: FluxAdapter, *, stages: int, stage: int) -> tuple[Block, ...]:
    """The blocks of one stage, contiguous, cut by counted cost. Raises `ValueError` for more stages than blocks."""
    run = balanced_stages([adapter.block_cost(block) for block in adapter.blocks], stages)[stage]
    return adapter.blocks[run.start : run.stop]
