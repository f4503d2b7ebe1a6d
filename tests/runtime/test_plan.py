"""Plans: what a user may ask for, and what each refusal says."""

import itertools
import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel_runtime.plan import AXES, MAX_RANKS, Layout, ParallelPlan, auto_plan, stages_error
from parallel_runtime.planner.memory import PlannedMemory, bytes_by_rank, fits_by_shares
from parallel_runtime.shares import corrected_shares, parse_shares, shares_by_speed


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ulysses=0", ["ulysses=0", "1 to 8"]),
        ("ulysses=-3", ["ulysses=-3", "1 to 8"]),
        ("ring=1000000", ["ring=1000000", "1 to 8"]),
        ("ulysses=4,ring=4", ["ulysses=4,ring=4", "16 ranks", "lower"]),
        ("ulysses=3,ring=3", ["9 ranks, more than 8", "lower"]),
        ("uly=2", ["'uly'", "ulysses"]),
        ("ulysses", ["'ulysses'", "ulysses=2,ring=2"]),
        ("ulysses=two", ["'two'", "whole number; use 1 to 8"]),
        ("ulysses=2.0", ["'2.0'", "whole number"]),
        ("ulysses=2,ulysses=4", ["ulysses", "twice"]),
        ("data=2,cfg=2,ulysses=3", ["ulysses=3,cfg=2,data=2", "12 ranks", "lower"]),
        ("cfg=9", ["cfg=9", "1 to 8"]),
        ("pipefusion=3,patches=2", ["patches=2", "3 stages", "patches=3"]),
        ("patches=4", ["patches=4", "needs stages", "pipefusion=2"]),
        ("warmup_steps=2", ["warmup_steps=2", "needs stages", "pipefusion=2"]),
        ("pipefusion=2,warmup_steps=0", ["warmup_steps=0", "below 1", "use 1"]),
        ("pipefusion=2,patches=-2", ["patches=-2", "2 stages", "patches=2"]),
        ("pipefusion=2,patches=many", ["'many'", "whole number; use one from 1 on"]),
        (
            "weights=sharded",
            ["weights=sharded", "one rank in each of 1 replica", "weights=replicated", "weights=offloaded"],
        ),
        ("data=4,weights=sharded", ["weights=sharded", "each of 4 replica(s)", "raise cfg"]),
        ("pipefusion=3,weights=sharded", ["weights=sharded", "one rank in each stage", "raise cfg"]),
        ("weights=torn", ["'torn'", "replicated, sharded, offloaded"]),
    ],
)
def test_a_plan_that_cannot_be_names_value_limit_and_remedy(text: str, words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        ParallelPlan.parse(text)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_degree_that_is_no_whole_number_is_refused_from_json_too() -> None:
    for value in (True, 2.0, "2", None):
        with pytest.raises(ValueError, match="not a whole number"):
            ParallelPlan.from_dict({"ulysses": value})
    before_stages = {"data": 1, "cfg": 1, "pipefusion": 1, "ring": 1, "ulysses": 2, "weights": "replicated"}
    assert ParallelPlan.from_dict(before_stages) == ParallelPlan(ulysses=2)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("ulysses=2, ring=2", "ring2-uly2"),
        ("cfg=2", "cfg2-ring1-uly1"),
        ("cfg=2,ulysses=2", "cfg2-ring1-uly2"),
        ("data=2", "data2-ring1-uly1"),
        ("data=2,cfg=2,ring=2", "data2-cfg2-ring2-uly1"),
        ("ulysses=4,weights=sharded", "uly4-sharded"),
        ("cfg=2,weights=sharded", "cfg2-ring1-uly1-sharded"),
        ("weights=offloaded", "single-offloaded"),
        ("pipefusion=2,ulysses=2", "pipe2-ring1-uly2"),
        ("pipefusion=2,patches=5,warmup_steps=3", "pipe2-ring1-uly1"),
        ("ring=2,ulysses=2,weights=offloaded", "ring2-uly2-offloaded"),
    ],
)
def test_every_plan_has_a_name_of_one_word_and_is_read_as_it_is_described(text: str, name: str) -> None:
    plan = ParallelPlan.parse(text)
    assert plan.name == name
    assert ParallelPlan.parse(plan.describe()) == plan
    assert ParallelPlan.from_dict(plan.to_dict()) == plan


def test_a_plan_says_what_its_ranks_share() -> None:
    plan = ParallelPlan(data=2, cfg=2, ring=2)
    assert (plan.batch_groups, plan.parts, plan.replica_ranks) == (4, 2, 4)
    for asked, layout, name in (
        ("data=2,cfg=2,ring=2", Layout(ranks=8), "replicated"),
        ("data=2,ulysses=3,weights=sharded", Layout(ranks=6, shards=3), "sharded over 3"),
        ("weights=offloaded", Layout(ranks=1, offloaded=True), "offloaded"),
        ("data=2,cfg=2,weights=offloaded", Layout(ranks=4, shards=2, offloaded=True), "offloaded, sharded over 2"),
        (
            "pipefusion=2,ulysses=2,weights=sharded",
            Layout(ranks=4, shards=2, stages=2, stage_ranks=2),
            "sharded over 2, 2 stages",
        ),
    ):
        assert ParallelPlan.parse(asked).layout == layout and layout.name == name


def test_weights_serve_plans_of_their_kind_and_of_no_more_ranks() -> None:
    four = Layout(ranks=4)
    assert four.serves(Layout(ranks=4)) and four.serves(Layout(ranks=2))
    assert not four.serves(Layout(ranks=8))
    assert not four.serves(Layout(ranks=4, shards=2))
    assert not four.serves(Layout(ranks=4, offloaded=True))
    assert not Layout(ranks=4, stages=2).serves(Layout(ranks=4, stages=2, stage_ranks=2))


def test_the_ranks_of_a_stage_hold_what_it_needs() -> None:
    plan = ParallelPlan(data=2, pipefusion=2, ulysses=2)
    assert plan.layout == Layout(ranks=8, stages=2, stage_ranks=2)
    assert [plan.layout.stage_of(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert ParallelPlan(cfg=2, pipefusion=2, ulysses=2, weights="sharded").layout.shards == 4
    assert plan.layout.kind != ParallelPlan(data=4, pipefusion=2).layout.kind
    assert plan.layout.kind == ParallelPlan(pipefusion=2, ulysses=2).layout.kind


@given(st.integers(1, MAX_RANKS), st.integers(1, 64))
def test_the_auto_plan_uses_every_rank_and_always_fits_the_heads(ranks: int, heads: int) -> None:
    plan = auto_plan(ranks, heads)
    assert plan == ParallelPlan(ulysses=plan.ulysses, ring=ranks // plan.ulysses) and plan.ranks == ranks
    assert heads % plan.ulysses == 0
    assert not any(heads % d == 0 and ranks % d == 0 for d in range(plan.ulysses + 1, ranks + 1))


def test_shares_are_as_small_as_they_can_be_and_equal_ones_are_none() -> None:
    plan = ParallelPlan.parse("ring=2,ulysses=2,shares=2:4:6:8")
    assert (plan.shares, plan.name) == ((1, 2, 3, 4), "ring2-uly2-1:2:3:4")
    assert ParallelPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan == ParallelPlan.parse(plan.describe())
    assert plan.shares_within(0) == ((3, 7), (4, 6))  # an axis has the sums over the other
    assert ParallelPlan.parse("ulysses=2,shares=5:5") == ParallelPlan(ulysses=2)
    groups = ParallelPlan.parse("data=2,ulysses=2,shares=3:1:1:1")
    assert (groups.shares_within(0), groups.shares_within(1)) == (((), (3, 1)), ((), ()))
    assert groups.group_shares(2) == (4, 2) and ParallelPlan.parse("data=2,ulysses=2").group_shares(2) == ()
    assert [groups.computed_part(rank) for rank in range(4)] == pytest.approx([2, 2 / 3, 2 / 3, 2 / 3])
    sides = ParallelPlan.parse("cfg=2,ulysses=2,shares=1:1:3:1")
    assert [sides.computed_part(rank) for rank in range(4)] == pytest.approx([1, 1, 2, 2 / 3])
    assert ParallelPlan(ulysses=2).with_shares((3, 1, 9)).shares == (3, 1)
    assert ParallelPlan(ulysses=2, shares=(3, 1)).layout == ParallelPlan(ulysses=2).layout  # weights are whole


def test_shares_cut_what_ranks_hold_together_and_stages_and_stay_as_they_were_loaded() -> None:
    stages = ParallelPlan.parse("cfg=2,pipefusion=2,ulysses=2,shares=3:1:1:1:2:2:1:1")
    assert stages.layout.stage_shares == (8, 4) and stages.shares_within(0) == stages.shares_within(1) == ((), ())
    layout = ParallelPlan.parse("data=2,ulysses=2,shares=3:1:2:2,weights=sharded").layout
    assert (layout.shares_of((0, 1)), layout.shares_of((2, 3)), layout.stage_shares) == ((3, 1), (), ())
    assert [layout.part_of(rank) for rank in range(4)] == [0.75, 0.25, 0.5, 0.5]
    assert [stages.layout.part_of(rank) for rank in (0, 2)] == [8 / 12, 4 / 12]
    both = replace(stages, weights="sharded").layout  # of a stage's four ranks those of a replica hold it together
    assert both.holders_of(6) == (2, 3, 6, 7)
    assert [both.part_of(rank) for rank in (0, 6)] == [8 / 12 * 3 / 8, 4 / 12 / 4]
    assert ParallelPlan.parse("data=2,ulysses=2,weights=sharded").layout.serves(layout)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ulysses=2,shares=0:1", "leave out a device"),
        ("ulysses=2,shares=1001:1", "outside 1 to 1000"),
        ("ulysses=2,shares=-1:1", "outside 1 to 1000"),
        ("ulysses=2,shares=3:2:1", "3 rank.s., the plan has 2"),
        ("ulysses=2,shares=a:b", "whole number; use 1 to 1000"),
    ],
)
def test_shares_that_cannot_be_are_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ParallelPlan.parse(text)
    with pytest.raises(ValueError, match="no list"):
        ParallelPlan.from_dict({"ulysses": 2, "shares": 3})


@pytest.mark.parametrize(
    ("text", "shares"),
    [
        ("measured", None),
        ("equal", ()),
        ("1, 3", (1, 3)),  # as it is told of plans and in errors
        ("24000, 8000", (3, 1)),
        ("1001, 1", (1000, 1)),
        ("1:0.6", (1000, 600)),
        ("1, 0.0001", (1000, 0)),  # rounds to nothing: left out
    ],
)
def test_what_a_user_writes_becomes_shares(text: str, shares: object) -> None:
    assert parse_shares(text, 2) == shares


@pytest.mark.parametrize("text", ["0, 0", "-1, 2", "nan, 1", "inf, 1", "1", "3, 2, 1", "fast, slow", "1,,2"])
def test_shares_of_a_user_that_cannot_be_name_the_remedy(text: str) -> None:
    with pytest.raises(ValueError, match="use equal, measured, or a number for each device"):
        parse_shares(text, 2)


def test_measured_shares_are_tenths_and_of_devices_of_one_name_none() -> None:
    assert shares_by_speed(["RTX 4090", "RTX 3090"], [140.0, 84.0]) == (10, 6)
    assert shares_by_speed(["RTX 4090", "RTX 4090"], [140.0, 84.0]) == ()
    assert shares_by_speed(["RTX 4090", "RTX 4080"], [140.0, 130.0]) == ()
    assert shares_by_speed(["A", "B"], [140.0, 0.0]) == shares_by_speed([], []) == ()


def test_an_image_is_cut_into_as_many_patches_as_there_are_stages_unless_said_otherwise() -> None:
    assert ParallelPlan(pipefusion=3).num_patches == 3
    assert ParallelPlan(pipefusion=3, patches=5).num_patches == 5
    assert ParallelPlan(ulysses=3).num_patches == 1


def test_more_stages_than_blocks_are_refused() -> None:
    assert stages_error(4, 4) is None
    assert stages_error(5, 4) == "pipefusion=5 is more stages than the model's 4 blocks; use at most 4"


@given(
    st.lists(st.integers(1, 2), min_size=len(AXES), max_size=len(AXES)).filter(lambda degrees: math.prod(degrees) <= 8)
)
def test_coordinates_count_the_last_axis_fastest_and_tell_all_ranks_apart(degrees: list[int]) -> None:
    plan = ParallelPlan(**dict(zip(AXES, degrees, strict=True)))
    places = [tuple(plan.coordinates(rank).values()) for rank in range(plan.ranks)]
    assert places == list(itertools.product(*map(range, degrees)))
    assert list(plan.coordinates(0)) == list(AXES)


@pytest.mark.parametrize(
    ("shares", "speeds", "found"),
    [
        ((10, 10), (2.0, 1.0), (10, 5)),
        ((10, 6), (1.0, 0.59), (10, 6)),  # less than 10 % quicker by another split
        ((10, 6), (1.0, 0.52), (10, 6)),
        ((10, 6), (1.0, 0.3), (10, 3)),
        ((10, 3), (1.0, 0.6), (10, 6)),
        ((10, 10, 10), (1.0, 0.5, 0.02), (10, 5, 1)),  # never none: a device is left out by the user alone
    ],
)
def test_shares_are_corrected_by_what_ranks_took_where_that_gains_a_tenth(
    shares: tuple, speeds: tuple, found: tuple
) -> None:
    took_s = [share / speed for share, speed in zip(shares, speeds, strict=True)]
    assert corrected_shares(shares, took_s) == found
    assert corrected_shares(shares, [each / 1000 for each in took_s]) == found, "of steps of milliseconds, too"
    again_s = [share / speed for share, speed in zip(found, speeds, strict=True)]
    assert corrected_shares(found, again_s) == found
    assert corrected_shares(shares, [0.0, *took_s[1:]]) == shares


def test_each_rank_has_room_for_its_share_of_what_it_computes_with() -> None:
    memory = PlannedMemory(weights=4, activations=6, buffers=2, runtime=2)
    equal, unequal = ParallelPlan(ulysses=2), ParallelPlan(ulysses=2, shares=(3, 1))
    assert fits_by_shares(memory, equal, [14, 14]) and not fits_by_shares(memory, equal, [14, 13])
    assert fits_by_shares(memory, unequal, [18, 10]) and not fits_by_shares(memory, unequal, [17, 10])
    assert not fits_by_shares(memory, unequal, [18, 9])
    staged = ParallelPlan(pipefusion=2, shares=(3, 1))
    assert bytes_by_rank(replace(memory, shared=2), staged) == (16, 12)  # its tokens are equal, its blocks' keys not
    assert bytes_by_rank(memory, ParallelPlan.parse("cfg=2,ulysses=2,shares=2:1:4:4"))[0] > 14  # of two, not of four
    shared, unequal = (
        replace(memory, shared=4),
        replace(unequal, weights="sharded"),
    )  # of which the first rank holds 6, and the second may hold as much as before
    assert fits_by_shares(shared, unequal, [20, 10]) and not fits_by_shares(shared, unequal, [19, 10])
