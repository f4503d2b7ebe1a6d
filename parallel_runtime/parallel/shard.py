"""How many tokens, heads or rows each of several ranks has: uneven lengths planned once, as Python ints.

Lengths may be zero; nothing is ever padded. The one function for all that is shared out: equal devices get lengths that
differ by at most one, unequal ones (`ParallelPlan.shares`) lengths in proportion.
"""

from functools import lru_cache


@lru_cache(maxsize=1024)  # a step asks for the same ones again and again
def split_lengths(
    total: int, parts: int, shares: tuple[int, ...] = (), *, from_last: bool = False, least: int = 0
) -> tuple[int, ...]:
    """Cut `total` tokens into `parts` runs in proportion to `shares`, by largest remainder; () stands for equal ones.

    Of equal remainders the first parts have the longer runs, or the last ones with `from_last`. No run is shorter than
    `least` where there are as many tokens as that needs. Raises `ValueError` for shares that do not fit.
    """
    if total < 0 or parts < 1:
        raise ValueError(f"cannot cut {total} tokens into {parts} parts; use at least 0 tokens and 1 part")
    shares = shares or (1,) * parts
    if len(shares) != parts or min(shares) < 1:
        raise ValueError(f"shares {shares} of {parts} parts; give each part one of 1 or more")
    whole = sum(shares)
    lengths = [total * share // whole for share in shares]
    order = sorted(range(parts), key=lambda part: (-(total * shares[part] % whole), -part if from_last else part))
    for part in order[: total - sum(lengths)]:
        lengths[part] += 1
    while total >= least * parts and min(lengths) < least:
        lengths[lengths.index(max(lengths))] -= 1
        lengths[lengths.index(min(lengths))] += 1
    return tuple(lengths)
