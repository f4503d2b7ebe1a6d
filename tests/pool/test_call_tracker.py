"""Which calls find on the ranks what the call before them left, and which go through whole."""

from dataclasses import asdict, replace

import pytest
import torch

from parallel_runtime.model_call import CallPlace, ModelCall
from parallel_runtime.parallel.batch_groups import BatchSlice
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.worker_group import CallTracker

PLAN = ParallelPlan(pipefusion=2, warmup_steps=2)
ONE_LANE = ((BatchSlice(0, 0, 1),),)


def call(run: str = "a run", key: str = "cond", *, tokens: int = 8) -> ModelCall:
    tensors = {"img": torch.zeros(1, tokens, 4)}
    return ModelCall(tensors=tensors, out_shape=(1, tokens, 4), place=CallPlace(run, key))


def entered(tracker: CallTracker, *calls: ModelCall, plan: ParallelPlan = PLAN, model: int = 1) -> dict:
    """What the ranks are told of the one call, which they then do."""
    (told,) = tracker.enter(calls, ONE_LANE, plan, model)
    tracker.done()
    return asdict(told)


def test_calls_of_a_run_warm_up_and_then_find_what_the_one_before_left() -> None:
    tracker = CallTracker()
    told = [entered(tracker, call()) for _ in range(4)]
    assert [each["warm"] for each in told] == [True, True, False, False]
    assert {(each["epoch"], each["slot"]) for each in told} == {(1, 0)}
    assert entered(tracker, call(key="uncond")) == {"epoch": 1, "slot": 1, "warm": True}
    assert entered(tracker, call("another run")) == {"epoch": 2, "slot": 0, "warm": True}
    assert entered(tracker, call()) == {"epoch": 3, "slot": 0, "warm": True}, "of the run before nothing is kept"


def test_runs_that_travel_together_each_find_their_own_until_a_new_one_joins() -> None:
    """Of a list over replicas: the calls of each step come in one request, and a run that ends first stops none."""
    tracker, batch_groups = CallTracker(), ((BatchSlice(0, 0, 1),), (BatchSlice(1, 0, 1),))
    for step in range(4):
        told = tracker.enter([call("one"), call("two")], batch_groups, PLAN, 1)
        tracker.done()
        assert [(each.epoch, each.slot, each.warm) for each in told] == [(1, 0, step < 2), (1, 1, step < 2)]
    assert entered(tracker, call("one")) == {"epoch": 1, "slot": 0, "warm": False}
    (moved,) = tracker.enter([call("two")], ((), (BatchSlice(0, 0, 1),)), PLAN, 1)
    tracker.done()
    assert (moved.epoch, moved.warm) == (1, True), "the ranks have its keys under another number"
    joined = tracker.enter([call("two"), call("three")], batch_groups, PLAN, 1)
    assert [(each.epoch, each.warm) for each in joined] == [(2, True), (2, True)]


@pytest.mark.parametrize(
    "other", [{"plan": replace(PLAN, patches=3)}, {"model": 2}], ids=["another plan", "another model"]
)
def test_another_plan_or_model_begins_anew(other: dict) -> None:
    tracker = CallTracker()
    for _ in range(3):
        told = entered(tracker, call())
    assert not told["warm"]
    assert entered(tracker, call(), **other) == {"epoch": 2, "slot": 0, "warm": True}


def test_another_shape_has_a_slot_of_its_own() -> None:
    tracker = CallTracker()
    for _ in range(3):
        entered(tracker, call())
    assert entered(tracker, call(tokens=12)) == {"epoch": 1, "slot": 1, "warm": True}
    assert entered(tracker, call()) == {"epoch": 1, "slot": 0, "warm": False}


def test_nothing_is_known_after_a_request_that_was_not_done() -> None:
    tracker = CallTracker()
    for _ in range(3):
        entered(tracker, call())
    tracker.enter([call()], ONE_LANE, PLAN, 1)  # and the ranks never say that they did it
    assert entered(tracker, call()) == {"epoch": 2, "slot": 0, "warm": True}


def test_a_call_of_no_run_is_warm_up_and_leaves_nothing() -> None:
    tracker = CallTracker()
    told = entered(tracker, replace(call(), place=None))
    assert (told["slot"], told["warm"]) == (None, True)
