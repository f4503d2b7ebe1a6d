"""How much each device computes, compared with the others, as a user writes it and as it is measured. Plain Python.

Owns the words, and that small differences are none. What a plan does with shares is plan.py's.
"""

import math
from collections.abc import Sequence

from .plan import MOST_SHARE

MEASURED, EQUAL = "measured", "equal"
ALIKE = 1.1  # devices whose speeds differ by less are equal
CHANGE = 1.1  # times quicker: below it a split that was measured in a run stays
TENTHS = 10  # measured speeds are told apart in tenths of the quickest: another measurement seldom moves a split


def parse_shares(text: str, num_devices: int) -> tuple[int, ...] | None:
    """One share a device: whole numbers as they are written, others in thousandths of the largest; () for `equal` and
    None for `measured`. 0: it is left out.

    Raises `ValueError` for what is no number, negative, of more or fewer devices than there are, or adds up to 0.
    """
    word = text.strip().lower()
    if word in (EQUAL, MEASURED, ""):
        return () if word == EQUAL else None
    remedy = f"use {EQUAL}, {MEASURED}, or a number for each device, as 2, 1"
    try:
        numbers = [float(part) for part in text.replace(":", ",").split(",")]
    except ValueError:
        raise ValueError(f"shares={text!r} is no list of numbers; {remedy}") from None
    if not all(math.isfinite(number) and number >= 0 for number in numbers):
        raise ValueError(f"shares={text!r} has a number that is below 0 or no number; {remedy}")
    if len(numbers) != num_devices:
        raise ValueError(f"shares={text!r} names {len(numbers)} device(s), {num_devices} are there; {remedy}")
    if sum(numbers) == 0:
        raise ValueError(f"shares={text!r} add up to 0, so no device would compute; {remedy}")
    if all(number.is_integer() for number in numbers):
        divisor = math.gcd(*map(int, numbers))
        if max(numbers) <= MOST_SHARE * divisor:
            return tuple(int(number) // divisor for number in numbers)
    return tuple(round(MOST_SHARE * number / max(numbers)) for number in numbers)


def shares_by_speed(names: Sequence[str], speeds: Sequence[float]) -> tuple[int, ...]:
    """The shares of devices that were measured, in tenths of the quickest; () where they are of one name, or alike."""
    if len(set(names)) < 2 or min(speeds, default=0.0) <= 0 or max(speeds) <= ALIKE * min(speeds):
        return ()
    found = tuple(max(1, round(TENTHS * speed / max(speeds))) for speed in speeds)
    return found if len(set(found)) > 1 else ()


def corrected_shares(shares: Sequence[int], compute_s: Sequence[float]) -> tuple[int, ...]:
    """The shares of ranks that computed for so many seconds under `shares`, in tenths of the quickest.

    `shares` as they were, unless the slowest rank is to take `CHANGE` times less: a rank computes whole heads, rows and
    images, so small differences are no other split.
    """
    if min(compute_s) <= 0:
        return tuple(shares)
    speeds = [share / seconds for share, seconds in zip(shares, compute_s, strict=True)]
    found = tuple(max(1, round(TENTHS * speed / max(speeds))) for speed in speeds)
    slowest_s = max(share / sum(found) * sum(shares) / speed for share, speed in zip(found, speeds, strict=True))
    return found if CHANGE * slowest_s < max(compute_s) else tuple(shares)
