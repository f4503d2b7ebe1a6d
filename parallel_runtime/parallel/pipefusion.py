"""PipeFusion's cut of blocks into stages (arXiv 2405.14430, section 4). Plain numbers; knows no tensor and no rank."""

from collections.abc import Sequence
from itertools import accumulate


def balanced_stages(costs: Sequence[float], stages: int) -> tuple[range, ...]:
    """Cut blocks of these costs into runs, none empty, whose most costly costs the least.

    By dynamic programming over (stages, blocks). Raises `ValueError` for more stages than blocks.
    """
    if not 1 <= stages <= len(costs):
        raise ValueError(f"{stages} stages for {len(costs)} blocks; use 1 to {len(costs)}")
    before = [0.0, *accumulate(costs)]
    # by number of blocks placed: the cost of the most costly run so far, and where each run ended
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, (0,))}
    for _ in range(stages):
        best = {
            end: min(
                (max(cost, before[end] - before[begin]), (*cuts, end))
                for begin, (cost, cuts) in best.items()
                if begin < end
            )
            for end in range(min(best) + 1, len(costs) + 1)
        }
    cuts = best[len(costs)][1]
    return tuple(range(begin, end) for begin, end in zip(cuts[:-1], cuts[1:], strict=True))
