"""Which plans a run begins to try, and why it tries none. Does not own what happens in a try (test_trying.py)."""

from dataclasses import fields, make_dataclass, replace
from types import SimpleNamespace

import pytest
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
    again = same | {"choose_again": lambda work: two}
    assert begin.Tunable(**again).why_not.startswith("how fast these devices are is unknown")
    assert begin.Tunable(**again | {"decision": replace(two, table=("a row",))}).why_not == ""


def test_the_panel_is_told_which_model_ran_last_with_what(module_of_pack) -> None:
    begin = module_of_pack("nodes.host.proof.begin_tries")
    of = SimpleNamespace(pooled=SimpleNamespace(spec=SimpleNamespace(path="/models/a.safetensors")), why_not="no")
    last = begin.LastRun(of=of, work=None, sizes={"width": 64})
    assert last.described == {"model": "a.safetensors", "why_not": "no", "width": 64}
    known = replace(last, work=SimpleNamespace(text_tokens=7, guided=True))
    assert known.described == last.described | {"text_tokens": 7, "guided": True}


@pytest.fixture
def case(module_of_pack, new_run, monkeypatch) -> SimpleNamespace:
    """A MODEL for which auto predicts ulysses 2, where ring 2 can run too; a test sets `graphs`, and what is `kept`."""
    begin = module_of_pack("nodes.host.proof.begin_tries")
    plan_of = module_of_pack("parallel_runtime.plan").ParallelPlan
    uly2, ring2 = (plan_of(**{axis: 2}) for axis in ("ulysses", "ring"))
    rows = [SimpleNamespace(plan=each, memory=each.name) for each in (uly2, ring2)]
    given = {each.name: None for each in fields(begin.Tunable)} | {"shares": (), "tries": True, "choose_again": print}
    found = SimpleNamespace(begin=begin, uly2=uly2, ring2=ring2, rows=rows, graphs=set(), kept=None, keyed=[])
    found.of = begin.Tunable(**given | {"prover": SimpleNamespace(num_computed=0)})
    found.two = replace(new_run("/a.safetensors").decision, plan=uly2, automatic=True)
    found.kept_plan = module_of_pack("parallel_runtime.planner.tries").KeptPlan
    for name, value in {
        "key_of": lambda *_, graphs: found.keyed.append(graphs) or "key",
        "under_graphs": lambda *_: frozenset(found.graphs),
        "is_asynchronous": lambda _: True,
        "store": lambda: SimpleNamespace(load=lambda key: found.kept),
    }.items():
        monkeypatch.setattr(begin, name, value)
    monkeypatch.setattr(begin.Tunable, "table", lambda *_: rows)
    found.begun = lambda steps=20: begin.with_tries(found.of, SimpleNamespace(steps=steps, rows=1), found.two)
    return found


def test_plans_that_were_tried_are_tried_again_where_runs_came_to_be_slower_if_they_can_run_now(
    case, module_of_pack
) -> None:
    uly2, ring2, cfg2 = case.uly2, case.ring2, module_of_pack("parallel_runtime.plan").ParallelPlan(cfg=2)
    seconds = {uly2: 2.0, ring2: 1.0, cfg2: 3.0}
    for again, tried in ((True, (ring2, uly2)), (False, ())):
        case.kept = case.kept_plan(plan=ring2, seconds=seconds, expected_s=1.0, again=again)
        decision, trier = case.begun()
        assert decision.plan == ring2 and decision.reasons[-1] == f"measured on these devices: {case.kept.text}"
        assert (trier.trier.plans if again else trier.plans) == tried
        assert not again or (trier.now.plans, trier.memory) == (tried, {each: each.name for each in (uly2, ring2)})
    sampled, with_tries = SimpleNamespace(steps=20, rows=1), case.begin.with_tries
    for changes in ({"tries": False}, {"choose_again": None}):
        assert with_tries(replace(case.of, **changes), sampled, case.two) == (case.two, None)
    assert with_tries(case.of, None, case.two) == (case.two, None)


def test_no_run_waits_for_plans_that_may_gain_by_graphs_one_alone_included(case, monkeypatch) -> None:
    begin, uly2, ring2, worth = case.begin, case.uly2, case.ring2, ()
    monkeypatch.setattr(begin, "worth_trying", lambda *_, **__: worth)
    assert case.begun() == (case.two, None)
    case.graphs = {ring2}
    assert case.begun() == (case.two, None), "of a plan that is not tried"
    case.graphs = {uly2}
    _, trier = case.begun()
    assert (trier.trier.plans, trier.now, trier.trier.graphs) == ((uly2,), None, {uly2})
    worth = (uly2, ring2)
    _, trier = case.begun()
    assert (trier.trier.plans, trier.now) == (worth, None)
    monkeypatch.setattr(begin, "IDLE", SimpleNamespace(waits=lambda key: waits and key == "key", offer=None))
    monkeypatch.setattr(begin, "graphs_pay_at_once", lambda row, *, steps: pays and (row, steps) == (case.rows[0], 20))
    for waits, pays in ((True, True), (True, False), (False, True)):  # one prompt after another: nothing else is tried
        _, trier = case.begun()
        assert (trier.now is not None) == (waits and pays), (waits, pays)
        assert trier.now is None or (trier.now.plans, trier.now.limit, trier.now.graphs) == ((uly2,), None, {uly2})
        assert trier.now is None or trier.now.alone
    case.kept = case.kept_plan(plan=uly2, seconds={uly2: 1.0}, expected_s=1.0, again=True)
    waits = pays = True
    _, trier = case.begun()
    assert (trier.trier.plans, trier.now) == ((uly2, ring2), None), "with those that had no time before"
    case.kept, case.graphs = None, {ring2}
    assert case.begun()[1].now is None
    case.graphs = set()
    _, trier = case.begun()
    assert trier.now.plans == worth and trier.now.limit == begin.LIMIT
    assert case.begun(steps=15)[1].now is None


def test_a_run_begins_by_graphs_that_are_kept_where_it_ends_sooner_for_them(case) -> None:
    uly2 = case.uly2
    case.kept = case.kept_plan(plan=uly2, seconds={uly2: 1.0}, graphs_s={uly2: 0.5}, expected_s=0.5)
    with_them, without = f"measured on these devices: {case.kept.text}", "measured on these devices: kept ulysses 2"
    for steps, room, by_graphs in ((2, True, True), (1, True, False), (20, False, False)):
        case.graphs = {uly2} if room else set()
        decision, trier = case.begun(steps)
        assert (trier.by_graphs, decision.plan) == (by_graphs, uly2), steps
        assert decision.reasons[-1] == (with_them if by_graphs else without)
    assert case.keyed == [True, True, False]


def test_plans_that_do_not_fit_or_that_the_model_cannot_have_are_not_in_the_table(case, monkeypatch) -> None:
    begin, (uly2, ring2) = case.begin, (case.uly2, case.ring2)
    monkeypatch.undo()  # of the table
    monkeypatch.setattr(begin.Tunable, "has_room", lambda _, row: row.room)
    monkeypatch.setattr(begin.Tunable, "_takes", lambda _, plan: plan.ring == 1)
    row = make_dataclass("Row", ("plan", "fits", "room"))
    every = [row(plan, fits, room) for plan in (uly2, ring2) for fits in (True, False) for room in (True, False)]
    for shares, rows in (((), every[:2]), ((3, 1), every[:1])):
        found = replace(case.of, shares=shares).table(SimpleNamespace(table=every))
        assert found == [replace(each, plan=uly2.with_shares(shares)) for each in rows]


@pytest.mark.parametrize(
    ("fits", "room", "equal"), [(True, False, True), (True, True, False), (False, False, False), (False, True, False)]
)
def test_shares_that_leave_a_device_no_room_are_equal_and_it_is_said(case, monkeypatch, fits, room, equal) -> None:
    monkeypatch.setattr(case.begin.Tunable, "has_room", lambda _, row: row.room)
    row = SimpleNamespace(plan=case.two.plan, fits=fits, room=room)
    decision = replace(case.two, table=(row,))
    of, told = case.begin._with_room(replace(case.of, shares=(3, 1)), decision)
    text = "shares 3:1 leave a device no room for its share, so shares are equal"
    assert of.shares == (() if equal else (3, 1))
    assert told.reasons == (*decision.reasons, *([text] if equal else []))


def test_graphs_are_left_off_where_their_memory_does_not_fit(module_of_pack, monkeypatch) -> None:
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


def test_loras_that_run_beside_the_weights_are_part_of_what_seconds_hold_for(module_of_pack, new_run) -> None:
    begin, work = module_of_pack("nodes.host.proof.begin_tries"), module_of_pack("parallel_runtime.planner.work").Work
    device = module_of_pack("parallel_runtime.devices").Device("cpu", 0)
    pooled = SimpleNamespace(devices=(device,), sizes=SimpleNamespace(total=9), plan=new_run("/a.safetensors").plan)
    known = SimpleNamespace(comfyui="1", pack="2", model_class="M", source="3", weights="bf16", kernels="sdpa")
    given = {each.name: None for each in fields(begin.Tunable)} | {"pooled": pooled}
    given |= {"prover": SimpleNamespace(key=lambda *_: known), "decision": new_run("/a.safetensors").decision}
    keys = [
        begin.key_of(
            begin.Tunable(**given | {"side_branch": beside, "deltas": SimpleNamespace(deltas=("delta",) * count)}),
            work(image_tokens=9, text_tokens=9),
            graphs=False,
        ).kernels
        for beside, count in ((False, 0), (False, 2), (True, 0), (True, 2), (True, 3))
    ]
    assert keys == ["sdpa", "sdpa", "sdpa", "sdpa side_branch=2", "sdpa side_branch=3"]
