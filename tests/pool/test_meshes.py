"""The book of process groups: which plans' groups stay, which go, and that ranks never have more than is planned."""

import itertools
import random

import pytest

from parallel_runtime.exchange_groups import groups_of, weight_groups
from parallel_runtime.plan import Layout, ParallelPlan
from parallel_runtime.planner.memory import extra_bytes, kept_groups_bytes
from parallel_runtime.pool.worker_group import Meshes
from parallel_runtime.wire.requests import MakeMesh


class Ranks:
    """Ranks that do as they are told, and the book of their parent."""

    def __init__(self, num_ranks: int) -> None:
        self.book, self.made, self.changes = Meshes(num_ranks), set(), []
        self.num_ranks = num_ranks

    def use(self, plan: ParallelPlan, *held: Layout) -> MakeMesh | None:
        change = self.book.change_for(plan, held)
        if change is None:
            self.book.use(plan)
        else:
            assert len(set(change.freed)) == len(change.freed)
            assert self.made.issuperset(change.freed)
            self.made = self.made - set(change.freed) | set(groups_of(plan, self.num_ranks))
            self.book.apply(change)
            self.changes.append(change)
        assert list(self.book)[-1] == plan
        return change


def plans(num_ranks: int) -> list[ParallelPlan]:
    """Every product of degrees on so many ranks or fewer, replicated and sharded."""
    found = []
    for degrees in itertools.product((1, 2, 3, 4, 8), repeat=5):
        data, cfg, stages, ring, ulysses = degrees
        for weights in ("replicated", "sharded"):
            try:
                found.append(
                    ParallelPlan(data=data, cfg=cfg, pipefusion=stages, ring=ring, ulysses=ulysses, weights=weights)
                )
            except ValueError:
                continue
    return [plan for plan in found if plan.ranks <= num_ranks]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_groups_are_kept_up_to_what_the_plan_with_the_most_of_them_needs(num_ranks: int) -> None:
    assert kept_groups_bytes(num_ranks) == max(
        extra_bytes(groups_of(plan, num_ranks), num_ranks) for plan in plans(num_ranks)
    )


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_ranks_never_have_more_groups_than_the_planner_counts(num_ranks: int) -> None:
    ranks, chance = Ranks(num_ranks), random.Random(num_ranks)  # noqa: S311  which plans
    every, most = plans(num_ranks), 0
    for _ in range(400):
        plan = chance.choice(every)
        ranks.use(plan)
        assert ranks.made.issuperset(groups_of(plan, num_ranks))
        beside = extra_bytes(ranks.made - set(groups_of(plan, num_ranks)), num_ranks)
        assert beside <= kept_groups_bytes(num_ranks), plan.describe()
        most = max(most, beside)
        left = {group for other in ranks.book for group in groups_of(other, num_ranks)}
        assert ranks.made == left, "what is there is what a plan of the book has"
    assert most > kept_groups_bytes(num_ranks) / 2, "the groups that are kept are worth their place"


def test_two_plans_in_turn_make_their_groups_once() -> None:
    every = plans(8)
    for seed in range(300):
        pair = random.Random(seed).sample(every, 2)  # noqa: S311  which plans
        ranks = Ranks(8)
        for plan in pair * 3:
            ranks.use(plan)
        assert len(ranks.changes) == 2, [plan.describe() for plan in pair]


def test_what_was_used_longest_ago_goes_first() -> None:
    one, other, new = (
        ParallelPlan.parse(text)
        for text in ("cfg=2,ring=2,ulysses=2,weights=sharded", "pipefusion=2,ulysses=4,weights=sharded", "pipefusion=8")
    )
    for before, goes in (((one, other), one), ((one, other, one), other)):
        ranks = Ranks(8)
        for plan in before:
            ranks.use(plan)
        change = ranks.use(new)
        assert change is not None
        assert list(change.dropped) == [goes]
        assert set(change.freed) == set(groups_of(goes, 8)).difference(*(groups_of(plan, 8) for plan in ranks.book))


def test_groups_of_weights_that_are_held_outlive_every_plan() -> None:
    sharded = ParallelPlan(cfg=2, ulysses=4, weights="sharded")
    ranks = Ranks(8)
    ranks.use(sharded)
    for plan in plans(8):
        ranks.use(plan, sharded.layout)
        assert ranks.made.issuperset(weight_groups(sharded.layout)), plan.describe()
    ranks.use(ParallelPlan(pipefusion=8))
    ranks.use(ParallelPlan(cfg=2, ring=2, ulysses=2, weights="sharded"))
    ranks.use(ParallelPlan(pipefusion=2, ulysses=4))
    assert sharded not in ranks.book


def test_the_plan_that_was_used_last_needs_nothing_whatever_is_held() -> None:
    chance, every = random.Random(0), plans(8)  # noqa: S311  which plans
    layouts = [plan.layout for plan in every if plan.weights == "sharded"]
    dropped = 0
    for _ in range(100):
        ranks = Ranks(8)
        one, last = chance.sample(every, 2)
        held = chance.sample(layouts, 6)
        ranks.use(one)
        ranks.use(last)
        assert ranks.book.change_for(last, held) is None
        change = ranks.book.change_for(one, held)
        dropped += change is not None and last in change.dropped
    assert dropped, "the weights leave room for the other plan each time"
