"""The spec of a call in which patches between blocks act behind some blocks alone: tokens are whole there.

Made of two specs of a class: its own, and that of `BETWEEN`, by which tokens are whole behind every block. Does not own
behind which blocks a patch acts (models/hosted/block_hooks.py).
"""

from collections.abc import Collection
from dataclasses import replace

from .spec import ShardingSpec


def whole_behind(own: ShardingSpec, between: ShardingSpec, numbers: Collection[int], *, of: int) -> ShardingSpec:
    """`between`, but of the `of` blocks in its last list those with other numbers than these hand on cut tokens.

    Behind them tokens are cut, and what comes after the list takes cut tokens, as `own` says. Where the last block of
    the list is among the numbers, or all are, it is `between`.
    """
    *_, blocks = own.attention
    if of - 1 in numbers or not numbers:
        return between
    every, lists = f"{blocks}.*", tuple(f"{each}." for each in own.attention)
    opening, words = own.cut[f"{blocks}.0"], between.cut[every]
    cut = dict(between.cut) | {every: {name: word for name, word in words.items() if name not in opening}}
    cut |= {f"{blocks}.{number}": opening for number in (0, *(each + 1 for each in sorted(numbers)))}
    cut |= {path: words for path, words in own.cut.items() if not path.startswith(lists)}
    behind_each = dict(between.gathers[0])
    word = behind_each.pop(every)
    ends = {path: each for path, each in own.gathers[0].items() if not path.startswith(lists)}
    gather = behind_each | {f"{blocks}.{number}": word for number in sorted(numbers)} | ends
    return replace(between, cut=cut, gather=gather)
