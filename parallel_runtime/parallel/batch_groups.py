"""Which batch group runs which rows of which call: planned once, as Python ints.

A *call* of the model has rows (its batch), a row has tokens. A batch group is a group of ranks that exchanges nothing
with other batch groups. Knows no tensor and no rank.
"""

from collections.abc import Sequence
from itertools import accumulate

from ..plan import BatchSlice


def share_out(rows: Sequence[int], tokens: Sequence[int], batch_groups: int) -> tuple[tuple[BatchSlice, ...], ...]:
    """The pieces of each batch group. Call c has `rows[c]` rows of `tokens[c]` tokens each; a batch group may have
    none.

    Rows stay in order: laid end to end, call after call, they are cut into one run a batch group. Among all such cuts
    it takes one whose largest batch group has the fewest tokens, since a step ends with its slowest batch group. Of
    those, the one in which batch groups go through the blocks the fewest extra times (each call of a batch group is one
    more pass), then the most even one (least sum of squares), then the one with the longer runs first: five rows over
    two batch groups are 3 and
    2. Tokens stand for time: linear layers, nearly all of a step, cost as much a token.

    Raises `ValueError` for a call without rows or tokens, and for no call or batch group.
    """
    _check(rows, tokens, batch_groups)
    call_of = [call for call, count in enumerate(rows) for _ in range(count)]
    before = [0, *accumulate(tokens[call] for call in call_of)]
    cuts = _best_cuts(call_of, before, batch_groups, limit=_smallest_limit(before, batch_groups))
    starts = [0, *accumulate(rows)]
    return tuple(
        tuple(
            BatchSlice(call, max(begin, starts[call]) - starts[call], min(end, starts[call + 1]) - starts[call])
            for call in sorted(set(call_of[begin:end]))
        )
        for begin, end in zip(cuts[:-1], cuts[1:], strict=True)
    )


def _check(rows: Sequence[int], tokens: Sequence[int], batch_groups: int) -> None:
    if batch_groups < 1 or not rows or len(rows) != len(tokens):
        raise ValueError(
            f"{len(rows)} calls with {len(tokens)} lengths over {batch_groups} batch groups; use at least one call, "
            "a length for each, and one batch group"
        )
    for call, (count, length) in enumerate(zip(rows, tokens, strict=True)):
        if count < 1 or length < 1:
            raise ValueError(f"call {call} has a batch of {count} rows of {length} tokens; use at least one of each")


def _smallest_limit(before: list[int], batch_groups: int) -> int:
    """The fewest tokens that the largest of `batch_groups` runs can have. `before[i]` are the tokens of the first i
    rows."""
    low, high = max(b - a for a, b in zip(before[:-1], before[1:], strict=True)), before[-1]
    while low < high:
        middle = (low + high) // 2
        if _runs_needed(before, middle) <= batch_groups:
            high = middle
        else:
            low = middle + 1
    return low


def _runs_needed(before: list[int], limit: int) -> int:
    """How many runs of at most `limit` tokens there must be."""
    runs, begin = 1, 0
    for row in range(1, len(before)):
        if before[row] - before[begin] > limit:
            runs, begin = runs + 1, row - 1
    return runs


def _best_cuts(call_of: list[int], before: list[int], batch_groups: int, *, limit: int) -> list[int]:
    """Where the batch groups begin, and the last ends: by dynamic programming over (batch groups, rows), as the
    docstring says."""
    total = len(call_of)
    # by number of rows placed: the cost of the best way to place them in the batch groups so far, and where each batch
    # group ended
    best: dict[int, tuple[tuple[int, int], list[int]]] = {0: ((0, 0), [0])}
    for _ in range(batch_groups):
        longer: dict[int, tuple[tuple[int, int], list[int]]] = {}
        for end in range(total + 1):
            begin = end
            while begin >= 0 and before[end] - before[begin] <= limit:
                if begin in best:
                    (extra, squares), cuts = best[begin]
                    passes = call_of[end - 1] - call_of[begin] if end > begin else 0
                    cost = (extra + passes, squares + (before[end] - before[begin]) ** 2)
                    if end not in longer or cost < longer[end][0]:
                        longer[end] = (cost, [*cuts, end])
                begin -= 1
        best = longer
    return best[total][1]
