"""Stages and patches as plain numbers: every block in one stage, every token in one place of the buffer."""

from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.pipeline_schedule import DIGITS, bubble, even_order, ideal_bubble, picture, schedule
from parallel_runtime.parallel.pipefusion import PatchedSequence, balanced_stages, patch_lengths


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


@given(st.integers(0, 9), st.integers(1, 40), st.integers(1, 7), st.integers(1, 4), st.integers(0, 9))
def test_every_token_has_one_place_and_every_chunk_finds_its_own(
    num_text: int, num_image: int, num_patches: int, parts: int, more_text: int
) -> None:
    sequence = PatchedSequence(num_text, num_image, min(num_patches, num_image), parts, num_text + more_text)
    assert sorted(sequence.order) == list(range(num_text + num_image))
    places = [
        place
        for chunk in sequence.chunks(warm=False)
        for part in range(parts)
        for place in range(sequence.slot(part, chunk).start, sequence.slot(part, chunk).stop)
    ]
    assert sorted(places) == list(range(num_text + num_image))
    sizes = [sum(sequence.lengths(chunk)) for chunk in sequence.chunks(warm=False)]
    assert sum(sizes) == sum(sequence.lengths(sequence.whole)) == num_text + num_image
    assert max(sizes[1:], default=0) - min(sizes[1:], default=0) <= 1
    whole = torch.arange(num_image)
    for part in range(parts):
        mine = sequence.take(whole, part=part, stream="image", dim=0)
        for patch, chunk in enumerate(sequence.chunks(warm=False)):
            own = sequence.shard(part, patch).take(whole, stream="image", dim=0)
            assert torch.equal(mine[sequence.image_rows(part, chunk)], own)


@pytest.mark.parametrize(
    ("num_text", "num_image", "patches", "expected"),
    [
        (512, 4096, 4, (640, 1152, 1152, 1152)),  # Flux.1 at 1024 x 1024: every patch has 1,152 tokens
        (7, 72, 3, (20, 26, 26)),
        (0, 7, 3, (3, 2, 2)),
        (300, 64, 4, (1, 21, 21, 21)),  # the text alone is longer than an even patch
        (9, 3, 3, (1, 1, 1)),
        (9, 5, 1, (5,)),
    ],
)
def test_patches_are_as_long_as_each_other_with_the_text_before_the_first(
    num_text: int, num_image: int, patches: int, expected: tuple[int, ...]
) -> None:
    assert patch_lengths(num_image, patches, num_text=num_text) == expected


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
