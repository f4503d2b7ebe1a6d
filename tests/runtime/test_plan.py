"""Plans: what a user may ask for, and what each refusal says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel_runtime.plan import AXES, MAX_RANKS, ParallelPlan, auto_plan, heads_error


def test_a_plan_is_read_as_it_is_described() -> None:
    plan = ParallelPlan.parse("ulysses=2, ring=2")
    assert plan == ParallelPlan(ulysses=2, ring=2)
    assert plan.ranks == 4
    assert plan.name == "ring2-uly2"
    assert ParallelPlan.parse(plan.describe()) == plan
    assert ParallelPlan.from_dict(plan.to_dict()) == plan
    assert ParallelPlan().name == "single"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ulysses=0", ["ulysses=0", "1 to 8"]),
        ("ulysses=-3", ["ulysses=-3", "1 to 8"]),
        ("ring=1000000", ["ring=1000000", "1 to 8"]),
        ("ulysses=4,ring=4", ["ulysses=4,ring=4", "16 ranks", "lower"]),
        ("uly=2", ["'uly'", "ulysses"]),
        ("ulysses", ["'ulysses'", "ulysses=2,ring=2"]),
        ("ulysses=two", ["'two'", "whole number"]),
        ("ulysses=2.0", ["'2.0'", "whole number"]),
        ("ulysses=2,ulysses=4", ["ulysses", "twice"]),
        ("cfg=2", ["cfg=2", "not available", "cfg=1"]),
        ("data=2", ["data=2", "not available"]),
        ("pipefusion=2", ["pipefusion=2", "not available"]),
        ("weights=sharded", ["weights=sharded", "not available"]),
        ("weights=torn", ["'torn'", "replicated"]),
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


@given(st.integers(1, MAX_RANKS), st.integers(1, 64))
def test_the_auto_plan_uses_every_rank_and_always_fits_the_heads(ranks: int, heads: int) -> None:
    plan = auto_plan(ranks, heads)
    assert plan.ranks == ranks
    assert heads_error(plan.ulysses, heads) is None
    assert not any(heads % d == 0 and ranks % d == 0 for d in range(plan.ulysses + 1, ranks + 1))


def test_the_auto_plan_prefers_ulysses_and_falls_back_to_ring() -> None:
    assert auto_plan(4, 24) == ParallelPlan(ulysses=4)
    assert auto_plan(5, 24) == ParallelPlan(ring=5)
    assert auto_plan(4, 2) == ParallelPlan(ulysses=2, ring=2)


def test_heads_that_do_not_divide_are_told_what_would() -> None:
    text = heads_error(5, 24)
    assert text is not None
    assert text.startswith("ulysses=5 does not divide 24 heads; use one of 1, 2, 3, 4, 6, 8, 12, 24")
    assert "ring=5" in text


def test_every_axis_is_a_field_of_the_plan() -> None:
    assert set(ParallelPlan().to_dict()) == {*AXES, "weights"}
