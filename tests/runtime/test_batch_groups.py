"""Sharing rows of calls out over batch groups: every row once, in order, and no other way ends sooner."""

from itertools import combinations_with_replacement

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel_runtime.parallel.batch_groups import BatchSlice, cut_rows

CALLS = st.lists(st.integers(1, 9), min_size=1, max_size=6)
FEW_CALLS = st.lists(st.integers(1, 3), min_size=1, max_size=3)


def loads(batch_groups: tuple[tuple[BatchSlice, ...], ...]) -> list[int]:
    return [sum(stop - start for _, start, stop in pieces) for pieces in batch_groups]


@given(CALLS, st.integers(1, 8))
def test_every_row_of_every_call_is_run_once_and_in_order(rows: list[int], batch_groups: int) -> None:
    shared = cut_rows(rows, batch_groups)
    assert len(shared) == batch_groups
    run = [(piece.call, row) for pieces in shared for piece in pieces for row in range(piece.start, piece.stop)]
    assert run == [(call, row) for call, count in enumerate(rows) for row in range(count)]
    assert all(start < stop for pieces in shared for _, start, stop in pieces)


@given(FEW_CALLS, st.integers(1, 4))
def test_no_other_cut_has_a_smaller_largest_batch_group(rows: list[int], batch_groups: int) -> None:
    every_cut = combinations_with_replacement(range(sum(rows) + 1), batch_groups - 1)
    possible = [max(b - a for a, b in zip((0, *cuts), (*cuts, sum(rows)), strict=True)) for cuts in every_cut]
    assert max(loads(cut_rows(rows, batch_groups))) == min(possible)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([5], [[(0, 0, 3)], [(0, 3, 5)]]),
        ([1] * 5, [[(0, 0, 1), (1, 0, 1), (2, 0, 1)], [(3, 0, 1), (4, 0, 1)]]),
        ([2, 2], [[(0, 0, 2)], [(1, 0, 2)]]),  # cond and uncond
        # two rows of two calls would be two passes over the blocks
        ([3, 3], [[(0, 0, 2)], [(0, 2, 3)], [(1, 0, 2)], [(1, 2, 3)]]),
        ([4], [[(0, 0, 2)], [(0, 2, 3)], [(0, 3, 4)]]),
        ([1], [[(0, 0, 1)], [], []]),
    ],
    ids=str,
)
def test_rows_are_cut_so_that_no_batch_group_is_idle_or_runs_two_calls_for_nothing(rows: list, expected: list) -> None:
    assert cut_rows(rows, len(expected)) == tuple(tuple(BatchSlice(*each) for each in pieces) for pieces in expected)


@pytest.mark.parametrize(
    ("rows", "batch_groups", "words"),
    [
        ([0], 2, "call 0 has a batch of 0 rows"),
        ([1, -1], 2, "call 1 has a batch of -1 rows"),
        ([], 2, "0 calls"),
        ([1], 0, "0 batch groups"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(rows: list[int], batch_groups: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        cut_rows(rows, batch_groups)


@pytest.mark.parametrize(
    ("rows", "shares", "expected"),
    [
        ([6], (2, 1), [4, 2]),
        ([3, 3], (2, 1), [4, 2]),
        ([1, 1], (2, 1), [1, 1]),
        ([5], (1, 3, 1), [1, 3, 1]),
        ([2, 4], (1, 1, 2), [2, 1, 3]),
        ([1], (1, 2), [0, 1]),
        ([1, 1], (1, 3), [0, 2]),
        ([3], (1, 3, 1), [1, 2, 0]),
    ],
)
def test_rows_follow_the_shares_of_batch_groups(rows: list[int], shares: tuple[int, ...], expected: list[int]) -> None:
    assert loads(cut_rows(rows, len(shares), shares)) == expected
