"""Tries while no prompt runs, over a pool that does what a test says: when they begin, what ends them, what is kept.

Owns: `IdleTrier` and `IdleTries`. Does not own what happens in a try (test_trying.py), nor a graph (test_tries.py).
"""

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from comfy.test_run_context import new_run as new_run
from comfy.test_run_context import run_context as run_context
from comfy.test_trying import SECONDS, names
from comfy.test_trying import case as case
from comfy.test_trying import trying as trying


def wait_for_end_of(tries: Any) -> None:
    """Waits until the thread that tries plans has ended."""
    while tries._thread is not None:
        time.sleep(0.001)


@pytest.fixture
def idle(case, trying, module_of_pack, monkeypatch) -> Callable[..., Any]:
    """A short run that has ended, and what tries its plans: each step looks `busy` once, which says of each look
    whether a prompt runs."""
    idle_tries = module_of_pack("nodes.host.proof.idle_tries")
    planner_memory = module_of_pack("parallel_runtime.planner.memory").PlannedMemory
    monkeypatch.setattr(idle_tries, "POLL_S", 0.001)
    monkeypatch.setattr(idle_tries, "comfy", MagicMock())

    def make(
        takes: dict[str, Any],
        busy: Iterator[bool],
        *,
        free: int = 10**9,
        kinds: tuple[str, ...] = ("cuda",),
        holds: bool = True,
        gone: bool = False,
        now: tuple[str, ...] = (),
        later: int = 3,
        graphs: int | None = None,
        by_graphs: Any = 1.0,
        waited_for: Iterator[bool] = iter(()),  # noqa: B008  an empty one, which is never used up
    ) -> Any:
        found, told = case(takes, graphs=(by_graphs, {})), []
        found.run.step_seconds.clear()
        found.run.prover.gone = gone
        model = found.run.model
        model.devices, model.started = tuple(MagicMock(kind=kind) for kind in kinds), True
        model.holds = lambda _: holds and not found.retracted  # workers that failed hold nothing
        model.give_back, model.deltas = lambda _: told.append("given back"), None
        type(model.pool).is_waited_for = property(lambda _: next(waited_for, False))
        model.pool.measure_devices = lambda check: [SimpleNamespace(free_bytes=free)] * 2
        tries = idle_tries.IdleTries(lambda: next(busy, False), waits_s=0.001)
        trier = found.trier
        trier.graphs = frozenset() if graphs is None else frozenset([found.plans.uly2])
        more = {"graphs": 10**6 if graphs is None else graphs}
        memory = planner_memory(weights=10**9, activations=6 * 10**7, buffers=4 * 10**7, runtime=0, **more)
        if now:
            monkeypatch.setattr(trying, "time", SimpleNamespace(perf_counter=lambda: 1.2 * len(found.asked)))
        of_run = replace(trier, limit=3.0, asynchronous=False, plans=trier.plans[: len(now)]) if now else None
        trier.plans = trier.plans[:later]
        given = {"memory": {found.plans.uly2: memory}, "later": tries.offer, "now": of_run}
        found.run.trier = idle_trier = idle_tries.IdleTrier(trier=trier, **given)
        found.step()
        assert names(found) == [*filter(None, now), "uly2"] and (found.store.load(found.key) is None) == (not now)
        found.asked.clear()
        found.run.trier = idle_trier
        idle_trier.after(found.run)

        found.settle = partial(wait_for_end_of, tries)
        found.settle()
        return found, told

    return make


def test_a_short_runs_plans_are_tried_on_its_first_step_once_no_prompt_runs(idle) -> None:
    found, told = idle(SECONDS, iter([True, True, False]))
    assert found.store.load(found.key).plan == found.plans.ring2 and set(names(found)) == {"uly2", "ring2", "cfg2"}
    assert found.run.plan == found.plans.uly2 and not found.told and told == ["given back"]


@pytest.mark.parametrize(
    ("now", "later", "ring2_s", "kept"),
    [
        (("uly2", "ring2", ""), 3, 1.2, "cfg2"),
        (("uly2", "ring2"), 3, 2.0, "cfg2"),  # it tried all that it was to try, and a third is near
        (("uly2", "ring2"), 2, 1.2, "uly2"),  # one copy says little
        (("uly2", "ring2"), 2, 2.0, None),
    ],
)
def test_what_a_run_left_to_try_is_tried_after_it_and_nothing_else(idle, now, later, ring2_s, kept) -> None:
    """Its three steps take a copy of two plans. Where these are all, and one is far behind, nothing is left to try."""
    takes = {"uly2": 1.0, "ring2": ring2_s, "cfg2-ring1-uly1": 0.5}
    found, told = idle(takes, iter([]), now=now, later=later)
    assert found.store.load(found.key).plan == getattr(found.plans, kept or "uly2")
    assert told == (["given back"] if kept else [])
    assert sorted(set(names(found))) == (sorted(("uly2", "ring2", "cfg2")[:later]) if kept else [])


@pytest.mark.parametrize(
    ("ended_with", "kept", "offered"),
    [
        ("uly2", None, True),
        ("uly2", "ring2", True),
        ("ring2", "ring2", True),
        ("ring2", None, False),
        ("", "ring2", False),
    ],
)
def test_plans_are_due_after_a_run_that_goes_by_what_it_began_with_or_what_it_kept(
    ended_with: str, kept: str | None, offered: bool, module_of_pack
) -> None:
    trier, due = MagicMock(kept=kept and SimpleNamespace(plan=kept)), []
    given = {"memory": {}, "later": due.append, "_first": (SimpleNamespace(plan="uly2"), [])}
    module_of_pack("nodes.host.proof.idle_tries").IdleTrier(trier=trier, **given).after(
        SimpleNamespace(shares_by=lambda plan: plan == ended_with)
    )
    assert bool(due) is offered


def test_a_prompt_ends_them_at_once_and_they_come_again_three_times_at_most(idle) -> None:
    found, _ = idle(SECONDS, iter([False, False, False, True]))  # it ends the first time, in the second copy
    assert found.store.load(found.key).plan == found.plans.ring2 and names(found).count("uly2") > 2
    found.store.path.unlink()
    found, told = idle(SECONDS, (looks % 2 == 1 for looks in itertools.count()))
    found.run.trier.after(found.run)  # nor after another run of such work
    found.settle()
    assert not found.asked and found.store.load(found.key) is None and told == ["given back"] * 3


def test_who_waits_for_the_workers_ends_them_too_since_it_may_be_comfyuis_thread_of_prompts(idle) -> None:
    found, told = idle(SECONDS, iter([]), waited_for=iter([False, False, True]))
    assert found.store.load(found.key).plan == found.plans.ring2 and told == ["given back"] * 2
    found.store.path.unlink()
    found, told = idle(SECONDS, iter([]), waited_for=itertools.repeat(True))
    assert not found.asked and found.store.load(found.key) is None and told == ["given back"] * 3


def test_a_run_that_begins_while_plans_are_tried_gives_back_itself(idle, module_of_pack, monkeypatch) -> None:
    sampled = []
    monkeypatch.setattr(
        module_of_pack("nodes.host.proof.idle_tries"), "is_sampled_on", lambda of: sampled.append(of) or True
    )
    found, told = idle(SECONDS, iter([]))
    assert sampled == [found.run.model.devices] and told == [] and set(names(found)) == {"uly2", "ring2", "cfg2"}


def test_plans_wait_while_prompts_follow_each_other(module_of_pack, monkeypatch) -> None:
    idle_tries = module_of_pack("nodes.host.proof.idle_tries")
    monkeypatch.setattr(idle_tries, "POLL_S", 0.001)
    busy, asked = threading.Event(), []
    busy.set()
    tries = idle_tries.IdleTries(busy.is_set, waits_s=0.001)

    def compute(check: Callable[[], None]) -> bool:
        asked.append(tries.waits("key"))
        if len(asked) == 1:
            raise idle_tries.PromptBeganError
        return True

    def settled() -> None:
        busy.clear()
        wait_for_end_of(tries)
        busy.set()

    tries.offer(SimpleNamespace(trier=SimpleNamespace(key="before"), compute=compute))
    tries.offer(SimpleNamespace(trier=SimpleNamespace(key="key"), compute=compute))
    assert tries.waits("key") and tries.waits("before") and not tries.waits("another")
    settled()
    assert asked == [True, True], "a prompt ended the first; the second found all"
    assert not tries.waits("key") and tries.waits("before"), "which another took the place of"
    for number, ends in enumerate((idle_tries.PoolError("lost"), TypeError("odd"), False)):

        def fails(check: Callable[[], None], ends: Any = ends) -> bool:
            if isinstance(ends, Exception):
                raise ends
            return ends

        tries.offer(SimpleNamespace(trier=SimpleNamespace(key=number), compute=fails))
        settled()
        assert not tries.waits(number), "what failed is left to `tune`"


def test_a_system_without_a_thread_more_costs_the_tries_and_not_the_run(module_of_pack, monkeypatch, caplog) -> None:
    idle_tries = module_of_pack("nodes.host.proof.idle_tries")
    monkeypatch.setattr(idle_tries, "POLL_S", 0.001)
    tries, done = idle_tries.IdleTries(lambda: False, waits_s=0.001), []
    due = SimpleNamespace(trier=SimpleNamespace(key="key"), compute=lambda _: done.append(1) is None)

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as refused:
        refused.setattr(threading.Thread, "start", start)
        tries.offer(due)
    assert "plans are not tried: can't start new thread" in caplog.text and not done and not tries.waits("key")
    tries.offer(due)
    wait_for_end_of(tries)
    assert done == [1]


def test_a_plan_that_fails_while_idle_is_kept_out(idle, case) -> None:
    lost = case({}).errors.OutOfMemoryInRankError("no memory", rank=1)
    found, _ = idle({**SECONDS, "cfg2-ring1-uly1": lost}, iter([]))
    kept = found.store.load(found.key)
    assert (kept.plan, list(kept.failed)) == (found.plans.ring2, [found.plans.cfg2])
    found.store.path.unlink()
    found, _ = idle(SECONDS, iter([]), graphs=0, by_graphs=lost)
    kept = found.store.load(found.key)
    assert (kept.plan, kept.failed, kept.graphs_s) == (found.plans.ring2, {}, {}), (
        "graphs that fail are no plan that fails"
    )


def test_an_error_that_nobody_foresaw_is_told_and_ends_no_later_tries(idle, caplog) -> None:
    found, _ = idle(SECONDS | {"ring2": TypeError("odd")}, iter([]))  # waits until its thread has ended
    assert found.store.load(found.key) is None and names(found) == ["uly2"] * 2 + ["ring2"]
    assert "odd" in caplog.text


def test_without_room_weights_or_model_nothing_is_tried(idle, caplog) -> None:
    room = 15 * 10**7  # 1.5 times what a plan computes with, for each rank that shares it
    for kinds, free, tries in (
        (("cuda",) * 2, room, True), (("cuda",) * 2, room - 1, False),
        (("cpu",) * 2, 2 * room, True), (("cpu",) * 2, 2 * room - 1, False),
    ):  # fmt: skip
        found, _ = idle(SECONDS, iter([]), free=free, kinds=kinds)
        assert bool(found.asked) is tries
        found.store.path.unlink(missing_ok=True)
    for graphs, tries in ((0, True), (1, False)):  # which are counted where they are tried
        found, _ = idle(SECONDS, iter([]), free=room, graphs=graphs)
        assert any(options.get("graphs") for _, options in found.asked) is bool(found.asked) is tries
        found.store.path.unlink(missing_ok=True)
    for lack in ({"holds": False}, {"gone": True}):
        found = idle(SECONDS, iter([]), **lack)[0]
        assert not found.asked and found.run.trier.compute(print) is True, "which comes to nothing, and ends it"
    assert not [record for record in caplog.records if record.exc_info]


def test_what_was_tried_is_not_held_while_prompts_run(module_of_pack) -> None:
    computed, looked, over = threading.Event(), threading.Event(), threading.Event()

    class Due:
        trier = SimpleNamespace(key="a run's")

        def compute(self, check: object) -> bool:
            computed.set()
            return True

    def busy() -> bool:
        if computed.is_set():
            looked.set()
        return computed.is_set() and not over.is_set()

    tries = module_of_pack("nodes.host.proof.idle_tries").IdleTries(busy, waits_s=0.001)
    due = Due()
    held = weakref.ref(due)
    tries.offer(due)
    del due
    assert looked.wait(60)
    assert held() is None
    over.set()
    wait_for_end_of(tries)
