"""Lengths of parts: they add up, no padding, within one of each other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel_runtime.parallel.shard import split_lengths


@given(st.integers(0, 5000), st.integers(1, 8))
def test_lengths_add_up_and_differ_by_at_most_one(total: int, parts: int) -> None:
    lengths = split_lengths(total, parts)
    assert len(lengths) == parts
    assert sum(lengths) == total
    assert max(lengths) - min(lengths) <= 1
    assert list(lengths) == sorted(lengths, reverse=True), "the longer runs come first"


def test_parts_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="0 parts"):
        split_lengths(3, 0)
