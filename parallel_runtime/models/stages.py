"""Which of a model's blocks the stages of a pipeline run.

Every rank, asked the same, finds the same: the cut depends on the model alone.
"""

from collections.abc import Sequence

from ..parallel.pipefusion import balanced_stages


def stage_run(costs: Sequence[float], *, stages: int, stage: int) -> range:
    """The numbers of the blocks of one stage, contiguous, of blocks of these costs.

    Raises `ValueError` for more stages than blocks.
    """
    return balanced_stages(costs, stages)[stage]
