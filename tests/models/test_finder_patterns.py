"""What is said of the rows that moved: patterns as exact figures, at the edges where one becomes another."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from parallel_runtime.models.finder.probe import Pattern, Rows, Runs, described

# Which rows moved with the first, the middle and the last index; of how many indices; of how many rows; the pattern.
PATTERNS: list[tuple[Sequence[Sequence[int]], int, int, Pattern]] = [
    ([(), (), ()], 5, 9, "none"),
    ([(3,), (5,), (7,)], 5, 9, Rows(3)),
    ([(0,), (2,), (4,)], 5, 5, Rows(0)),
    ([(3,), (5,), ()], 5, 6, Rows(3, first=3)),
    ([(), (5,), (7,)], 5, 9, "other"),
    ([(3,), (6,), (7,)], 5, 9, "other"),
    ([(0, 1), (0, 1)], 2, 2, "all"),
    ([(0, 1)], 1, 2, "other"),
    ([(1, 2), (3, 4), (5, 6)], 3, 7, Runs(1, 2)),
    ([(1, 2), (3, 4), (5,)], 3, 6, Runs(1, 2)),
    ([(0, 1), (2, 3)], 2, 4, Runs(0, 2)),
    ([(0, 1), (2, 3), ()], 3, 4, "other"),
    ([(0, 1), (2, 3), (4, 5)], 3, 7, "other"),
    ([(0, 1), (2, 4), (4, 5)], 3, 6, "other"),
    ([(0, 1, 2), (1, 2, 3)], 2, 5, "other"),
]


@pytest.mark.parametrize(("moved", "size", "rows", "pattern"), PATTERNS)
def test_rows_that_move_with_an_index(moved: Sequence[Sequence[int]], size: int, rows: int, pattern: Pattern) -> None:
    indices = sorted({0, size // 2, size - 1})
    found = [(index, tuple(each)) for index, each in zip(indices, moved, strict=True)]
    assert described(found, size, rows) == pattern
