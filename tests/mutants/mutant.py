"""A mutant: one plausible mistake in the product, and the tests that must fail on it.

Owns what a mutant is. Where its text lies is `tree.py`'s, how it is tried `trial.py`'s.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """`old` becomes `new`. `old` must stand exactly once in all product files, or in those named `file`.

    name: what is wrong now, in a few words. tests: as `test_file.py::test_name`, without folders and with or without
    the parameters in brackets, the cheapest first. Files may move: both are searched for.
    """

    name: str
    old: str
    new: str
    tests: tuple[str, ...]
    file: str | None = None
