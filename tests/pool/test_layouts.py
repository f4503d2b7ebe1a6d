"""Which ranks hold a model: as many as its plans have needed, never more; and what the pool says of it."""

import os
import time

import pytest

from parallel_runtime.plan import ParallelPlan
from parallel_runtime.weight_delta import WeightDelta, WeightDeltas
from pool import echo_pool
from pool.echo_pool import make_spec, run_step

ONE, TWO = ParallelPlan(), ParallelPlan(ulysses=2)


def held(pool):
    return echo_pool.held(run_step(pool, spec=make_spec("measure")).ranks)


def changes(pool):
    return [rank.memory.reserved_bytes for rank in run_step(pool, spec=make_spec("measure")).ranks]


def test_ranks_beyond_a_plan_hold_nothing_for_it_and_join_when_a_plan_needs_them(pool):
    spec = make_spec("grows")
    before = held(pool)
    first = pool.load(spec, ONE)
    assert held(pool) == [before[0] + 1, before[1]]
    assert (pool.holds(spec, ONE), pool.holds(spec, TWO), pool.holds(spec)) == (True, False, False)
    seen = []
    more = pool.load(spec, TWO, progress=lambda *bytes_: seen.append(bytes_))
    assert seen[-1] == (100, 100), "only the rank that lacked it has loaded"
    assert more.ranks[0] is first.ranks[0]
    assert held(pool) == [count + 1 for count in before]
    assert pool.holds(spec, ONE)
    assert pool.holds(spec, TWO)
    assert pool.load(spec, ONE) is more, "a model on more ranks serves a plan of fewer"
    pool.unload(spec)
    assert held(pool) == before
    assert not pool.holds(spec, ONE)


def test_without_a_plan_every_rank_holds_the_model(pool):
    before = held(pool)
    pool.load(make_spec("everywhere"))
    assert held(pool) == [count + 1 for count in before]
    assert pool.holds(make_spec("everywhere"))
    for _ in range(2):  # the second finds nothing
        pool.unload(make_spec("everywhere"), TWO)
        assert held(pool) == before


def test_a_cancelled_load_of_further_ranks_leaves_no_part_of_the_model(pool):
    def give_up(*_):
        told.append(1)
        raise InterruptedError

    spec, told = make_spec("slow1"), []
    before = held(pool)
    pool.load(spec, ONE)
    with pytest.raises(InterruptedError):
        pool.load(spec, TWO, progress=give_up)
    assert held(pool) == before
    assert told == [1], "it was told of a load that it has given up"
    assert not pool.holds(spec, ONE)


def test_weights_changed_on_one_rank_are_changed_on_a_rank_that_joins(pool):
    """On the rank that was there before too, whose change is then one more; the same change again is none."""
    spec = make_spec("changed")
    change = WeightDeltas("change", (WeightDelta(key="x", kind="diff", strength=1.0, values=(None,)),))

    def done(plan):
        """How many changes each rank makes."""
        before = changes(pool)
        pool.load(spec, plan, deltas=change)
        return [now - then for now, then in zip(changes(pool), before, strict=True)]

    assert [done(plan) for plan in (ONE, ONE, TWO, TWO, ONE)] == [[1, 1], [0, 0], [1, 1], [0, 0], [0, 0]]
    pool.unload(spec)


def test_nothing_is_held_by_workers_that_have_died(pool_of):
    pool = pool_of(1)
    assert not pool.holds(make_spec())
    pool.load(make_spec())
    assert pool.holds(make_spec())
    os.kill(pool.status()["pids"][0], 9)
    while pool.state != "failed":
        time.sleep(0.01)
    assert not pool.holds(make_spec())


def test_a_request_without_work_is_refused_before_anything_starts(pool_of):
    """Which rows are no work, test_batch_groups.py says."""
    pool = pool_of(1)
    with pytest.raises(ValueError, match="no calls"):
        pool.run(make_spec(), ONE, [])
    assert pool.state == "stopped"
