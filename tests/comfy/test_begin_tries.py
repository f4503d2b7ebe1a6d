"""Which plans a run begins to try, and why it tries none. Does not own what happens in a try (test_trying.py)."""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace

from comfy.test_run_context import new_run as new_run
from comfy.test_run_context import run_context as run_context


def test_a_model_whose_runs_try_nothing_says_why_and_what_to_set(module_of_pack, new_run) -> None:
    begin = module_of_pack("nodes.host.proof.begin_tries")
    plan_of, run = module_of_pack("parallel_runtime.plan").ParallelPlan, new_run("/a.safetensors")
    two = replace(run.decision, plan=plan_of(ulysses=2), automatic=True)
    same = {each.name: None for each in fields(begin.Tunable)} | {"tries": True, "decision": two}
    for changes, said in (
        ({"tries": False}, "tries is off in SP Config"),
        ({"decision": replace(two, automatic=False)}, "SP Config's mode is manual"),
        ({"decision": replace(two, plan=plan_of())}, "auto takes one device for this model; name more devices"),
        ({}, "how fast these devices are is unknown; run `python -m parallel_runtime doctor --calibrate` once"),
        ({"decision": replace(two, reasons=("it reads values",))}, "plans are not predicted: it reads values"),
    ):
        assert begin.Tunable(**same | changes).why_not.startswith(said)
    assert begin.Tunable(**same | {"choose_again": lambda work: two}).why_not == ""


def test_plans_that_were_tried_are_tried_again_where_runs_came_to_be_slower_if_they_can_run_now(
    module_of_pack, new_run, monkeypatch
) -> None:
    begin, tries = module_of_pack("nodes.host.proof.begin_tries"), module_of_pack("parallel_runtime.planner.tries")
    plan_of, sampled = module_of_pack("parallel_runtime.plan").ParallelPlan, SimpleNamespace(steps=20, rows=1)
    plans = uly2, ring2, cfg2 = [plan_of(**{axis: 2}) for axis in ("ulysses", "ring", "cfg")]
    for name, value in {"key_of": "key", "under_graphs": frozenset(), "is_asynchronous": True}.items():
        monkeypatch.setattr(begin, name, lambda *_, value=value, **__: value)
    usable = [SimpleNamespace(plan=each, memory=each.name) for each in plans[:2]]
    monkeypatch.setattr(begin.Tunable, "table", lambda *_: usable)
    given = {each.name: None for each in fields(begin.Tunable)} | {"shares": (), "tries": True, "choose_again": print}
    of = begin.Tunable(**given | {"prover": SimpleNamespace(num_computed=0)})
    two = replace(new_run("/a.safetensors").decision, plan=uly2, automatic=True)
    for again, tried in ((True, (ring2, uly2)), (False, ())):
        kept = tries.KeptPlan(plan=ring2, seconds={uly2: 2.0, ring2: 1.0, cfg2: 3.0}, expected_s=1.0, again=again)
        monkeypatch.setattr(begin, "store", lambda kept=kept: SimpleNamespace(load=lambda key: kept))
        decision, trier = begin.with_tries(of, sampled, two)
        assert decision.plan == ring2 and decision.reasons[-1] == f"measured on these devices: {kept.text}"
        assert (trier.trier.plans if again else trier.plans) == tried
        assert not again or (trier.now.plans, trier.memory) == (tried, {each: each.name for each in (uly2, ring2)})
    for changes in ({"tries": False}, {"choose_again": None}):
        assert begin.with_tries(replace(of, **changes), sampled, two) == (two, None)
    assert begin.with_tries(of, None, two) == (two, None)


def test_no_run_waits_for_plans_that_may_gain_by_graphs_one_alone_included(
    module_of_pack, new_run, monkeypatch
) -> None:
    begin = module_of_pack("nodes.host.proof.begin_tries")
    plan_of, sampled = module_of_pack("parallel_runtime.plan").ParallelPlan, SimpleNamespace(steps=20, rows=1)
    uly2, ring2 = (plan_of(**{axis: 2}) for axis in ("ulysses", "ring"))
    usable, graphs, worth = [SimpleNamespace(plan=each, memory=each.name) for each in (uly2, ring2)], set(), ()
    values = {"key_of": "key", "is_asynchronous": True, "store": SimpleNamespace(load=lambda key: None)}
    for name, value in values.items():
        monkeypatch.setattr(begin, name, lambda *_, value=value, **__: value)
    monkeypatch.setattr(begin, "under_graphs", lambda *_: frozenset(graphs))
    monkeypatch.setattr(begin, "worth_trying", lambda *_, **__: worth)
    monkeypatch.setattr(begin.Tunable, "table", lambda *_: usable)
    given = {each.name: None for each in fields(begin.Tunable)} | {"shares": (), "tries": True, "choose_again": print}
    of = begin.Tunable(**given | {"prover": SimpleNamespace(num_computed=0)})
    two = replace(new_run("/a.safetensors").decision, plan=uly2, automatic=True)
    assert begin.with_tries(of, sampled, two) == (two, None)
    graphs = {ring2}
    assert begin.with_tries(of, sampled, two) == (two, None), "of a plan that is not tried"
    graphs = {uly2}
    _, trier = begin.with_tries(of, sampled, two)
    assert (trier.trier.plans, trier.now, trier.trier.graphs) == ((uly2,), None, {uly2})
    worth = (uly2, ring2)
    _, trier = begin.with_tries(of, sampled, two)
    assert (trier.trier.plans, trier.now) == (worth, None)
    monkeypatch.setattr(begin, "IDLE", SimpleNamespace(waits=lambda key: waits and key == "key", offer=None))
    monkeypatch.setattr(begin, "graphs_pay_at_once", lambda row, *, steps: pays and (row, steps) == (usable[0], 20))
    for waits, pays in ((True, True), (True, False), (False, True)):  # one prompt after another: nothing else is tried
        _, trier = begin.with_tries(of, sampled, two)
        assert (trier.now is not None) == (waits and pays), (waits, pays)
        assert trier.now is None or (trier.now.plans, trier.now.limit, trier.now.graphs) == ((uly2,), None, {uly2})
        assert trier.now is None or trier.now.alone
    kept_plan = module_of_pack("parallel_runtime.planner.tries").KeptPlan
    kept = kept_plan(plan=uly2, seconds={uly2: 1.0}, expected_s=1.0, again=True)
    monkeypatch.setattr(begin, "store", lambda: SimpleNamespace(load=lambda key: kept))
    waits = pays = True
    _, trier = begin.with_tries(of, sampled, two)
    assert (trier.trier.plans, trier.now) == ((uly2, ring2), None), "with those that had no time before"
    monkeypatch.setattr(begin, "store", lambda: SimpleNamespace(load=lambda key: None))
    waits, graphs = True, {ring2}
    assert begin.with_tries(of, sampled, two)[1].now is None
    graphs = set()
    _, trier = begin.with_tries(of, sampled, two)
    assert trier.now.plans == worth and trier.now.limit == begin.LIMIT
    assert begin.with_tries(of, SimpleNamespace(steps=15, rows=1), two)[1].now is None


def test_a_run_begins_by_graphs_that_are_kept_where_it_ends_sooner_for_them(
    module_of_pack, new_run, monkeypatch
) -> None:
    begin, tries = module_of_pack("nodes.host.proof.begin_tries"), module_of_pack("parallel_runtime.planner.tries")
    uly2 = module_of_pack("parallel_runtime.plan").ParallelPlan(ulysses=2)
    kept = tries.KeptPlan(plan=uly2, seconds={uly2: 1.0}, graphs_s={uly2: 0.5}, expected_s=0.5)
    asked, graphs = [], {uly2}
    monkeypatch.setattr(begin, "key_of", lambda *_, graphs: asked.append(graphs) or "key")
    monkeypatch.setattr(begin, "is_asynchronous", lambda _: True)
    monkeypatch.setattr(begin, "under_graphs", lambda *_: frozenset(graphs))
    monkeypatch.setattr(begin, "store", lambda: SimpleNamespace(load=lambda key: kept))
    monkeypatch.setattr(begin.Tunable, "table", lambda *_: [SimpleNamespace(plan=uly2, memory="memory")])
    given = {each.name: None for each in fields(begin.Tunable)} | {"shares": (), "tries": True, "choose_again": print}
    of = begin.Tunable(**given | {"prover": SimpleNamespace(num_computed=0)})
    two = replace(new_run("/a.safetensors").decision, plan=uly2, automatic=True)
    with_them, without = f"measured on these devices: {kept.text}", "measured on these devices: kept ulysses 2"
    for steps, room, by_graphs in ((2, True, True), (1, True, False), (20, False, False)):
        graphs = {uly2} if room else set()
        decision, trier = begin.with_tries(of, SimpleNamespace(steps=steps, rows=1), two)
        assert (trier.by_graphs, decision.plan) == (by_graphs, uly2), steps
        assert decision.reasons[-1] == (with_them if by_graphs else without)
    assert asked == [True, True, False]


def test_graphs_are_left_off_where_their_memory_does_not_fit(module_of_pack, new_run, monkeypatch) -> None:
    begin, plan = module_of_pack("nodes.host.proof.begin_tries"), module_of_pack("parallel_runtime.plan").ParallelPlan
    choose, cost, memory, devices = (
        module_of_pack(f"parallel_runtime.{name}")
        for name in ("planner.choose", "planner.cost", "planner.memory", "devices")
    )
    left_free = begin.GRAPHS_LEAVE // 0.95 + 1
    monkeypatch.setattr(begin, "whole_bytes", lambda _: [1000 + left_free] * 2)
    given = {each.name: None for each in fields(begin.Tunable)} | {"shares": ()}
    of = begin.Tunable(**given | {"pooled": SimpleNamespace(devices=(devices.Device("cuda", 0),) * 2)})
    parts = cost.Cost(step_s=0.5, compute_s=0.5, communication_s=0.0, launch_s=0.0, warmup_step_s=0.5)
    without = replace(parts, step_s=1.0, launch_s=0.5)
    for graphs, shares, left in ((50, (), True), (51, (), False), (50, (3, 1), False)):
        planned = memory.PlannedMemory(weights=800, activations=100, buffers=0, runtime=0, graphs=graphs)
        row = choose.Prediction(
            plan=plan(ulysses=2), cost=parts, memory=planned, run_s=20.0, fits=True, without_graphs=without
        )
        assert begin.under_graphs(replace(of, shares=shares), [row]) == ({row.plan} if left else set())
        assert begin.under_graphs(of, [replace(row, without_graphs=None)]) == set()


def test_the_first_line_of_the_drivers_version_is_kept_with_tries(module_of_pack, monkeypatch, tmp_path) -> None:
    begin = module_of_pack("nodes.host.proof.begin_tries")
    for content, said in ((b" NVRM 570.1 \nGCC 12\n", "NVRM 570.1"), (b"", ""), (b"\xff", ""), (None, "")):
        monkeypatch.setattr(begin, "DRIVER", file := tmp_path / f"version {said} {content is None}")
        if content is not None:
            file.write_bytes(content)
        assert begin._driver.__wrapped__() == said
