"""Lengths of parts: they add up, no padding, within one of each other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel_runtime.parallel.head_chunks import cut_groups
from parallel_runtime.parallel.shard import split_lengths


@given(st.integers(0, 5000), st.integers(1, 8))
def test_lengths_add_up_and_differ_by_at_most_one(total: int, parts: int) -> None:
    lengths = split_lengths(total, parts)
    assert len(lengths) == parts
    assert sum(lengths) == total
    assert max(lengths) - min(lengths) <= 1
    assert list(lengths) == sorted(lengths, reverse=True), "the longer runs come first"


@given(st.integers(0, 5000), st.lists(st.integers(1, 1000), min_size=1, max_size=8).map(tuple), st.booleans())
def test_lengths_by_shares_are_within_one_of_the_exact_part(total: int, shares: tuple[int, ...], last: bool) -> None:
    lengths = split_lengths(total, len(shares), shares, from_last=last)
    assert sum(lengths) == total
    for length, share in zip(lengths, shares, strict=True):
        assert abs(length - total * share / sum(shares)) < 1
    equal = split_lengths(total, len(shares))
    assert split_lengths(total, len(shares), (7,) * len(shares)) == equal
    assert split_lengths(total, len(shares), from_last=True) == equal[::-1]


def test_no_part_is_shorter_than_the_least_where_there_is_enough() -> None:
    assert split_lengths(10, 3, (1000, 1, 1)) == (10, 0, 0)
    assert split_lengths(10, 3, (1000, 1, 1), least=1) == (8, 1, 1)
    assert split_lengths(10, 3, (1, 1, 1000), least=1) == (1, 1, 8)
    assert split_lengths(9, 3, (1, 1000, 1), least=3) == (3, 3, 3) == split_lengths(9, 3, (1000, 1, 1), least=3)
    assert split_lengths(8, 3, (1, 1000, 1), least=3) == (0, 8, 0)
    assert split_lengths(2, 3, (1000, 1, 1), least=1) == (2, 0, 0)


@pytest.mark.parametrize("shares", [(1, 0), (1,), (1, 1, 1), (-1, 2)])
def test_shares_that_do_not_fit_are_refused(shares: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="give each part one"):
        split_lengths(10, 2, shares)


def test_heads_go_by_shares_in_any_number_of_chunks() -> None:
    assert cut_groups(8, 2, 1, (3, 1)) == ((6, 2),)
    assert cut_groups(8, 2, 2, (3, 1)) == ((3, 1), (3, 1))
    assert cut_groups(5, 3, 1, (90, 1, 1)) == ((3, 1, 1),)  # none is without a head
    assert cut_groups(8, 2, 2) == cut_groups(8, 2, 2, (1, 1)) == ((2, 2), (2, 2))


def test_parts_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="0 parts"):
        split_lengths(3, 0)
