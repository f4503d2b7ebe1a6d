"""How many tokens, heads or rows each of several ranks has: uneven lengths planned once, as Python ints.

Lengths may be zero; nothing is ever padded.
"""

from functools import lru_cache


@lru_cache(maxsize=1024)  # a step asks for the same ones again and again
def split_lengths(total: int, parts: int) -> tuple[int, ...]:
    """Cut `total` tokens into `parts` runs whose lengths differ by at most one, longer ones first."""
    if total < 0 or parts < 1:
        raise ValueError(f"cannot cut {total} tokens into {parts} parts; use at least 0 tokens and 1 part")
    base, extra = divmod(total, parts)
    return tuple(base + (part < extra) for part in range(parts))
