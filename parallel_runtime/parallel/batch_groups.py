"""Which batch group runs which rows of which call: planned once, as Python ints.

A *call* of the model has rows (its batch). A batch group is a group of ranks that exchanges nothing with other batch
groups. Knows no tensor and no rank.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate

from ..plan import BatchSlice


def cut_rows(rows: Sequence[int], batch_groups: int, shares: Sequence[int] = ()) -> tuple[tuple[BatchSlice, ...], ...]:
    """The pieces of each batch group. Call c has `rows[c]` rows; a batch group may have none.

    Rows stay in order: laid end to end, call after call, they are cut into one run a batch group. Among all such cuts
    it takes one whose largest batch group has the fewest rows, since a step ends with its slowest batch group. Of
    `shares`: how fast each batch group is compared with the others, by which its rows count less; () for equal ones. Of
    those, the one in which batch groups go through the blocks the fewest extra times (each call of a batch group is one
    more pass), then the most even one (least sum of squares), then the one with the longer runs first: five rows over
    two batch groups are 3 and 2.

    Raises `ValueError` for a call without rows, and for no call or batch group.
    """
    if batch_groups < 1 or not rows:
        raise ValueError(f"{len(rows)} calls over {batch_groups} batch groups; use at least one of each")
    for call, count in enumerate(rows):
        if count < 1:
            raise ValueError(f"call {call} has a batch of {count} rows; use at least one")
    call_of = [call for call, count in enumerate(rows) for _ in range(count)]
    cuts = _best_cuts(call_of, tuple(shares) or (1,) * batch_groups)
    starts = [0, *accumulate(rows)]
    return tuple(
        tuple(
            BatchSlice(call, max(begin, starts[call]) - starts[call], min(end, starts[call + 1]) - starts[call])
            for call in sorted(set(call_of[begin:end]))
        )
        for begin, end in zip(cuts[:-1], cuts[1:], strict=True)
    )


def _limits(total: int, shares: Sequence[int]) -> list[int]:
    """The most rows of each batch group where the slowest ends as early as it can."""
    if len(set(shares)) == 1:
        return [-(-total // len(shares))] * len(shares)
    times = sorted(Fraction(rows, share) for rows in range(1, total + 1) for share in set(shares))
    found = ([math.floor(time * share) for share in shares] for time in times)
    return next(limits for limits in found if sum(limits) >= total)


def _best_cuts(call_of: list[int], shares: Sequence[int]) -> list[int]:
    """Where the batch groups begin, and the last ends: by dynamic programming over (batch groups, rows)."""
    total = len(call_of)
    # by number of rows placed: the cost of the best way to place them in the batch groups so far, and where each batch
    # group ended
    best: dict[int, tuple[tuple[int, int], list[int]]] = {0: ((0, 0), [0])}
    whole = math.lcm(*shares)
    for limit, share in zip(_limits(total, shares), shares, strict=True):
        longer: dict[int, tuple[tuple[int, int], list[int]]] = {}
        for end in range(total + 1):
            for begin in range(end, max(0, end - limit) - 1, -1):
                if begin in best:
                    (extra, squares), cuts = best[begin]
                    passes = call_of[end - 1] - call_of[begin] if end > begin else 0
                    cost = (extra + passes, squares + (end - begin) ** 2 * (whole // share))
                    if end not in longer or cost < longer[end][0]:
                        longer[end] = (cost, [*cuts, end])
        best = longer
    return best[total][1]
