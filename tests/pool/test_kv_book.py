"""Which calls of a pipeline go through whole, and which use the keys and values of the call before them."""

from dataclasses import asdict, replace

import pytest
import torch

from parallel_runtime.parallel.batch_groups import BatchSlice
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.calls import ModelCall
from parallel_runtime.pool.kv_cache_tracker import KvCacheTracker

PLAN = ParallelPlan(pipefusion=2, warmup_steps=2)
ONE_LANE = ((BatchSlice(0, 0, 1),),)


def call(run: str = "a run", key: str = "cond", *, tokens: int = 8) -> ModelCall:
    tensors = {"img": torch.zeros(1, tokens, 4)}
    options = {"pipeline": {"run": run, "key": key}}
    return ModelCall(tensors=tensors, out_shape=(1, tokens, 4), out_dtype=torch.float32, options=options)


def entered(book: KvCacheTracker, *calls: ModelCall, plan: ParallelPlan = PLAN, model: int = 1) -> dict:
    """What the ranks are told of the one call, which they then do."""
    (told,) = book.enter(calls, ONE_LANE, plan, model)
    book.done()
    return asdict(told)


def test_calls_of_a_run_warm_up_and_then_find_what_the_one_before_left() -> None:
    book = KvCacheTracker()
    told = [entered(book, call()) for _ in range(4)]
    assert [each["warm"] for each in told] == [True, True, False, False]
    assert {(each["epoch"], each["slot"]) for each in told} == {(1, 0)}
    assert entered(book, call(key="uncond")) == {"epoch": 1, "slot": 1, "warm": True}
    assert entered(book, call("another run")) == {"epoch": 2, "slot": 0, "warm": True}
    assert entered(book, call()) == {"epoch": 3, "slot": 0, "warm": True}, "of the run before nothing is kept"


def test_runs_that_travel_together_each_find_their_own_until_a_new_one_joins() -> None:
    """Of a list over replicas: the calls of each step come in one request, and a run that ends first stops none."""
    book, batch_groups = KvCacheTracker(), ((BatchSlice(0, 0, 1),), (BatchSlice(1, 0, 1),))
    for step in range(4):
        told = book.enter([call("one"), call("two")], batch_groups, PLAN, 1)
        book.done()
        assert [(each.epoch, each.slot, each.warm) for each in told] == [(1, 0, step < 2), (1, 1, step < 2)]
    assert entered(book, call("one")) == {"epoch": 1, "slot": 0, "warm": False}
    (moved,) = book.enter([call("two")], ((), (BatchSlice(0, 0, 1),)), PLAN, 1)
    book.done()
    assert (moved.epoch, moved.warm) == (1, True), "the ranks have its keys under another number"
    joined = book.enter([call("two"), call("three")], batch_groups, PLAN, 1)
    assert [(each.epoch, each.warm) for each in joined] == [(2, True), (2, True)]


@pytest.mark.parametrize(
    "other",
    [{"plan": replace(PLAN, patches=3)}, {"model": 2}],
    ids=["another plan", "another model"],
)
def test_another_plan_or_model_begins_anew(other: dict) -> None:
    book = KvCacheTracker()
    for _ in range(3):
        told = entered(book, call())
    assert not told["warm"]
    assert entered(book, call(), **other) == {"epoch": 2, "slot": 0, "warm": True}


def test_another_shape_has_a_slot_of_its_own() -> None:
    book = KvCacheTracker()
    for _ in range(3):
        entered(book, call())
    assert entered(book, call(tokens=12)) == {"epoch": 1, "slot": 1, "warm": True}
    assert entered(book, call()) == {"epoch": 1, "slot": 0, "warm": False}


def test_nothing_is_known_after_a_request_that_was_not_done() -> None:
    book = KvCacheTracker()
    for _ in range(3):
        entered(book, call())
    book.enter([call()], ONE_LANE, PLAN, 1)  # and the ranks never say that they did it
    assert entered(book, call()) == {"epoch": 2, "slot": 0, "warm": True}


def test_a_call_of_no_run_is_warm_up_and_leaves_nothing() -> None:
    book = KvCacheTracker()
    told = entered(book, replace(call(), options={}))
    assert (told["slot"], told["warm"]) == (None, True)
    with pytest.raises(ValueError, match="option pipeline is"):
        entered(book, replace(call(), options={"pipeline": {"run": "x"}}))
