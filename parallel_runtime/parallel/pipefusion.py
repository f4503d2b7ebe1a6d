"""PipeFusion's cut of blocks into stages (arXiv 2405.14430, section 4). Plain numbers; knows no tensor and no rank."""

from collections.abc import Sequence
from itertools import accumulate


def balanced_stages(costs: Sequence[float], stages: int, shares: Sequence[int] = ()) -> tuple[range, ...]:
    """Cut blocks of these costs into runs, none empty, of which the one that takes the longest takes the least.

    `shares`: how fast each stage is compared with the others, () for equal ones. By dynamic programming over
    (stages, blocks). Raises `ValueError` for more stages than blocks.
    """
    if not 1 <= stages <= len(costs):
        raise ValueError(f"{stages} stages for {len(costs)} blocks; use 1 to {len(costs)}")
    before = [0.0, *accumulate(costs)]
    # by number of blocks placed: the cost of the most costly run so far, and where each run ended
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, (0,))}
    for share in shares or (1,) * stages:
        best = {
            end: min(
                (max(cost, (before[end] - before[begin]) / share), (*cuts, end))
                for begin, (cost, cuts) in best.items()
                if begin < end
            )
            for end in range(min(best) + 1, len(costs) + 1)
        }
    cuts = best[len(costs)][1]
    return tuple(range(begin, end) for begin, end in zip(cuts[:-1], cuts[1:], strict=True))
