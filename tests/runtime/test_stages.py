"""Stages and their schedule as plain numbers: every block in one stage, and what filling and draining cost."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.pipeline_schedule import DIGITS, bubble, even_order, ideal_bubble, picture, schedule
from parallel_runtime.parallel.pipefusion import balanced_stages


@given(st.lists(st.integers(1, 20), min_size=1, max_size=9), st.data())
def test_no_other_cut_has_a_cheaper_most_costly_stage(costs: list[int], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    found = balanced_stages(costs, stages)
    assert [block for run in found for block in run] == list(range(len(costs)))
    assert len(found) == stages and all(len(run) for run in found)
    every = [(0, *cuts, len(costs)) for cuts in combinations(range(1, len(costs)), stages - 1)]
    least = min(max(sum(costs[a:b]) for a, b in zip(cuts[:-1], cuts[1:], strict=True)) for cuts in every)
    assert max(sum(costs[run.start : run.stop]) for run in found) == least


def test_more_stages_than_blocks_cannot_be() -> None:
    with pytest.raises(ValueError, match="4 stages for 3 blocks"):
        balanced_stages([1, 1, 1], 4)


@pytest.mark.parametrize(
    ("costs", "patches", "calls", "expected"),
    [
        ([1.0, 1.0], 2, 1, 1 / 3),  # fill and drain of one step
        ([1.0, 1.0], 4, 1, 1 / 5),
        ([1.0, 1.0], 2, 10, 1 / 21),  # no wait between steps
        ([1.0, 1.0, 1.0], 3, 10, 2 / 32),
        ([1.0, 1.0, 1.0], 2, 10, 1 - 60 / (3 * 31)),  # fewer patches than stages: somebody always waits
        ([2.0, 1.0], 2, 10, 1 - 60 / (2 * 41)),
    ],
)
def test_the_ideal_bubble_is_what_filling_draining_and_uneven_stages_cost(
    costs: list[float], patches: int, calls: int, expected: float
) -> None:
    assert ideal_bubble(costs, patches=patches, calls=calls) == pytest.approx(expected)


def test_the_bubble_is_the_time_in_which_stages_compute_nothing() -> None:
    first = [[0, 0, 1, 0, 0.0, 0.0, 1.0], [0, 1, 2, 0, 1.0, 1.0, 2.0]]
    second = [[0, 0, 1, 0, 0.0, 1.0, 2.0], [0, 1, 2, 0, 2.0, 2.0, 3.0]]
    assert bubble([first, second]) == pytest.approx(1 / 3)


def test_a_schedule_waits_for_the_stage_before_and_for_the_last_stage_of_the_call_before() -> None:
    """The text goes with patch 0, which takes twice as long."""
    spans = schedule(even_order(2, patches=2, calls=2), lambda _, patch: 2.0 - patch)
    times = [[(call, patch, began, ended) for call, patch, _, _, _, began, ended in stage] for stage in spans]
    assert times == [
        [(0, 0, 0, 2), (0, 1, 2, 3), (1, 0, 4, 6), (1, 1, 6, 7)],  # call 1 begins when stage 1 has patch 0 of call 0
        [(0, 0, 2, 4), (0, 1, 4, 5), (1, 0, 6, 8), (1, 1, 8, 9)],
    ]
    with pytest.raises(ValueError, match="wait for each other"):
        schedule([[(0, 0), (0, 1)], [(0, 2)]], lambda _, __: 1.0)


def test_a_picture_of_many_patches_keeps_its_columns() -> None:
    spans = schedule(even_order(3, patches=16, calls=3), lambda _, __: 1.0)
    lines = [line.partition("|")[2] for line in picture(spans, width=100).splitlines()]
    assert {len(line) for line in lines} == {101}
    assert set(DIGITS[:16]) < set(lines[0])
