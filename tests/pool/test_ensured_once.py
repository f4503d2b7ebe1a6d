"""Weights, patches and groups are looked for once; again only when what the ranks hold has changed since."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from parallel_runtime.errors import BESIDE_BLOCKS, OutOfMemoryInRankError
from parallel_runtime.model_call import CallPlace, ModelCall
from parallel_runtime.parallel.overlap import OverlapRates
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.weight_delta import WeightDelta, WeightDeltas
from parallel_runtime.wire.protocol import Op
from parallel_runtime.wire.records import to_body
from pool.echo_pool import make_spec, run_step

CHANGE = WeightDeltas("changed", (WeightDelta(key="w", kind="diff", strength=1.0, values=(torch.ones(1),)),))
PLAN = ParallelPlan(ulysses=2)


def requests(pool: Any, act: Callable[[], object]) -> list[tuple[Op, dict[str, Any]]]:
    """What the ranks are asked while `act` runs, as the generation sends it."""
    found: list[tuple[Op, dict[str, Any]]] = []
    generation = pool._workers.generation
    ask = generation.ask

    def noting(request: Any, *rest: Any, **more: Any) -> Any:
        found.append((request.op, to_body(request)))
        return ask(request, *rest, **more)

    generation.ask = noting
    try:
        act()
    finally:
        del generation.ask
    return found


def asked(pool: Any, act: Callable[[], object]) -> Counter[str]:
    """How often each request is made."""
    return Counter(op.name for op, _ in requests(pool, act))


def step(
    pool: Any, deltas: WeightDeltas, name: str = "model", plan: ParallelPlan = PLAN, place: CallPlace | None = None
) -> None:
    told: Any = {"out_dtype": torch.float32, "options": {"sync": False}, "place": place}
    pool.run(make_spec(name), plan, [ModelCall(tensors={"x": torch.ones(4)}, out_shape=(4,), **told)], deltas=deltas)


def test_a_step_after_a_step_looks_for_nothing(pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    step(pool, CHANGE)
    looked: list[str] = []
    for name in ("load", "apply_deltas", "make_mesh"):
        monkeypatch.setattr(pool._workers, name, lambda *_, name=name, **__: looked.append(name))
    assert asked(pool, lambda: [step(pool, CHANGE) for _ in range(3)]) == {Op.STEP.name: 3}
    assert looked == []


@pytest.mark.parametrize(
    ("between", "asks"),
    [
        (lambda pool: pool.unload(make_spec()), {"LOAD": 1, "CHANGE": 1}),
        (lambda pool: step(pool, WeightDeltas()), {"CHANGE": 1}),
        (lambda pool: pool.load(make_spec("other")), {}),
        (lambda pool: (pool.close(), pool.start()), {"LOAD": 1, "CHANGE": 1, "MESH": 1}),
    ],
    ids=["freed", "other patches", "another model", "fresh workers"],
)
def test_what_changed_in_between_is_made_right_before_a_step(pool: Any, between: Callable, asks: dict) -> None:
    step(pool, CHANGE)
    between(pool)
    assert asked(pool, lambda: step(pool, CHANGE)) == asks | {"STEP": 1}
    assert asked(pool, lambda: step(pool, CHANGE)) == {"STEP": 1}


@pytest.mark.parametrize(("beside", "lean"), [(f" ({BESIDE_BLOCKS})", True), ("", False)])
def test_once_memory_ran_out_beside_blocks_that_stay_whole_none_does_until_the_workers_are_released(
    pool: Any, beside: str, lean: bool
) -> None:
    def told() -> list[bool]:
        steps = [body for op, body in requests(pool, lambda: step(pool, WeightDeltas())) if op is Op.STEP]
        return [bool(each.get("lean")) for body in steps for each in body["calls"]]

    with pytest.raises(OutOfMemoryInRankError):
        run_step(pool, plan=PLAN, faults={1: [["fail", "memory", f"CUDA out of memory{beside}"]]})
    step(pool, WeightDeltas())
    assert told() == [lean]
    pool.close()
    step(pool, WeightDeltas())
    assert told() == [False]


ONE_RANK, PLACE = ParallelPlan(), CallPlace("a run", "a text")


@pytest.mark.parametrize(
    ("between", "epochs"),
    [
        (lambda pool: None, 0),
        (lambda pool: step(pool, CHANGE, plan=ONE_RANK), 0),
        (lambda pool: step(pool, CHANGE, plan=ONE_RANK, place=PLACE), 2),
        (lambda pool: step(pool, CHANGE, "other", place=PLACE), 2),
        (lambda pool: pool.give_back(pool.devices), 1),
        (lambda pool: pool.unload(make_spec("other")), 1),
    ],
    ids=["nothing", "a call that leaves nothing", "another plan", "another model", "a run ends", "a model goes"],
)
def test_an_epoch_ends_where_ranks_may_differ_in_what_calls_left(pool: Any, between: Callable, epochs: int) -> None:
    """A plan of fewer ranks has them drop what those of a larger one left; the others have heard nothing of it."""

    def asked_in() -> int:
        ((_, body),) = [each for each in requests(pool, lambda: step(pool, CHANGE, place=PLACE)) if each[0] is Op.STEP]
        assert body["places"] == (PLACE,)
        return body["epoch"]

    before = asked_in()
    assert asked_in() == before
    between(pool)
    assert asked_in() == before + epochs


def test_ranks_are_told_what_the_pool_knows_of_devices_and_link(pool_of: Any) -> None:
    rates = OverlapRates(attention_flops=1e14, bandwidth=1e10, latency_s=4e-5)
    pool = pool_of(1, overlap=lambda plan: rates if plan.ulysses == 1 else None)
    pool.start()
    (op, body), *_ = requests(pool, lambda: pool.exchange_pattern(ParallelPlan()))
    assert op is Op.MESH and body["overlap"] == to_body(rates)
