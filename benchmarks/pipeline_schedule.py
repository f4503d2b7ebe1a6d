"""When the stages of a pipeline compute which patch: its bubble by the clock, and by the schedule that it kept to.

Owns the arithmetic of schedules and how they are drawn, as text. Runs nothing (pipefusion.py).

The *bubble* is the share of the stages' time after the warm-up in which they compute nothing, from the first patch that
comes to the last stage's last. A span is [call, first patch, patch after the last, conditioning, asked_s, began_s,
ended_s], as worker/timeline.py has it.
"""

from collections.abc import Callable, Sequence

CALL, FIRST, STOP, _, _, BEGAN, ENDED = range(7)
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"  # a patch is one character wide
Span = Sequence[float]
# What a stage takes for a patch of these numbers.
Cost = Callable[[int, int], float]


def steady(spans: Sequence[Span], warm_calls: int) -> list[Span]:
    """The spans after the warm-up."""
    return [span for span in spans if span[CALL] >= warm_calls]


def bubble(stages: Sequence[Sequence[Span]]) -> float:
    """The share of the stages' time in which they compute nothing, from the first begin to the last end."""
    begin = min(spans[0][BEGAN] for spans in stages)
    end = max(spans[-1][ENDED] for spans in stages)
    busy = sum(span[ENDED] - span[BEGAN] for spans in stages for span in spans)
    return 1 - busy / ((end - begin) * len(stages))


def schedule(orders: Sequence[Sequence[tuple[int, int]]], cost: Cost) -> list[list[Span]]:
    """When each stage would compute the (call, patch) of its order, messages taking no time.

    A patch comes from the stage before, and to the first stage from the last one's same patch of the call before; a
    stage takes them in its order, one at a time. Raises `ValueError` when the orders wait for each other.
    """
    done: dict[tuple[int, int, int], float] = {}
    spans: list[list[Span]] = [[] for _ in orders]
    left = [list(order) for order in orders]
    while any(left):
        moved = False
        for stage, order in enumerate(left):
            while order:
                call, patch = order[0]
                before = (stage - 1, call, patch) if stage else (len(orders) - 1, call - 1, patch)
                if before not in done and (stage or (call - 1, patch) in orders[-1]):
                    break
                free = spans[stage][-1][ENDED] if spans[stage] else 0.0
                began = max(free, done.get(before, 0.0))
                done[stage, call, patch] = began + cost(stage, patch)
                spans[stage].append([call, patch, patch + 1, 0, free, began, done[stage, call, patch]])
                order.pop(0)
                moved = True
        if not moved:
            raise ValueError(f"the stages wait for each other at {[order[:1] for order in left]}")
    return spans


def orders_of(stages: Sequence[Sequence[Span]]) -> list[list[tuple[int, int]]]:
    """The calls and patches of each stage, in the order in which it computed them."""
    return [[(int(span[CALL]), int(span[FIRST])) for span in spans] for spans in stages]


def even_order(stages: int, *, patches: int, calls: int) -> list[list[tuple[int, int]]]:
    """All patches of a call, then those of the next, on every stage."""
    return [[(call, patch) for call in range(calls) for patch in range(patches)] for _ in range(stages)]


def ideal_bubble(costs: Sequence[float], *, patches: int, calls: int) -> float:
    """`bubble` of stages that take `costs` a patch, across the calls of a run, and of messages that take no time."""
    orders = even_order(len(costs), patches=patches, calls=calls)
    return bubble(schedule(orders, lambda stage, _: costs[stage]))


def counted_cost(blocks: Sequence[int], tokens: Sequence[int]) -> Cost:
    """A patch's operations in a stage, in units of a token in a block, by the blocks of each stage and the tokens of
    each patch: a token's products and its attention to all tokens take as much in every block. What is outside the
    blocks is left out."""
    return lambda stage, patch: float(blocks[stage] * tokens[patch])


def picture(stages: Sequence[Sequence[Span]], *, width: int = 110) -> str:
    """A line a stage: the patch's number while it computes (`#` all of them), a dot while it waits.

    Numbers are of one character: after 9 comes a. The last patch that has begun in a column is what stands there.
    """
    begin = min(spans[0][BEGAN] for spans in stages)
    end = max(spans[-1][ENDED] for spans in stages)
    lines = []
    for stage, spans in enumerate(stages):
        line = ["."] * width
        for span in spans:
            left, right = (round((span[at] - begin) / (end - begin) * width) for at in (BEGAN, ENDED))
            mark = "#" if span[STOP] - span[FIRST] > 1 else DIGITS[int(span[FIRST]) % len(DIGITS)]
            for column in range(left, max(right, left + 1)):
                line[min(column, width - 1)] = mark
        lines.append(f"stage {stage} |{''.join(line)}|")
    return "\n".join(lines)
