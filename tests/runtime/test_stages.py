"""Stages as plain numbers: every block in one stage, and no cheaper cut."""

from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel_runtime.parallel.pipefusion import balanced_stages


@given(st.lists(st.integers(1, 20), min_size=1, max_size=9), st.data())
def test_no_other_cut_has_a_cheaper_most_costly_stage(costs: list[int], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    shares = data.draw(st.just([]) | st.lists(st.integers(1, 5), min_size=stages, max_size=stages))
    found = balanced_stages(costs, stages, shares)
    assert [block for run in found for block in run] == list(range(len(costs)))
    assert len(found) == stages and all(len(run) for run in found)
    every = [(0, *cuts, len(costs)) for cuts in combinations(range(1, len(costs)), stages - 1)]
    speeds = shares or [1] * stages

    def slowest(cuts: Sequence[int]) -> float:
        return max(sum(costs[a:b]) / by for a, b, by in zip(cuts[:-1], cuts[1:], speeds, strict=True))

    assert slowest([run.start for run in found] + [len(costs)]) == min(map(slowest, every))


def test_more_stages_than_blocks_cannot_be() -> None:
    with pytest.raises(ValueError, match="4 stages for 3 blocks"):
        balanced_stages([1, 1, 1], 4)
