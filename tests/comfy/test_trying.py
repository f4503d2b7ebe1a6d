"""Tries over a pool that does what a test says: plans that fail, Cancel, a part of a step, and an unproven plan.

Owns: what `Trier` does with what happens in a try. Does not own the rules (planner/test_tries.py) nor a whole graph
(test_tries.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import fields, replace
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from comfy.test_run_context import new_run as new_run
from comfy.test_run_context import run_context as run_context


class CancelledError(Exception):
    """Stands for ComfyUI's interrupt."""


@pytest.fixture(scope="module")
def trying(module_of_pack) -> ModuleType:
    return module_of_pack("nodes.host.proof.trying")


@pytest.fixture
def case(new_run, trying, module_of_pack, tmp_path, monkeypatch) -> Callable[..., SimpleNamespace]:
    """A run that tries ulysses 2, ring 2 and cfg 2, where a step takes `seconds`, or raises what stands there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    plan_of = module_of_pack("parallel_runtime.plan").ParallelPlan
    errors = module_of_pack("parallel_runtime.errors")
    ulysses, ring, cfg = (plan_of(**{axis: 2}) for axis in ("ulysses", "ring", "cfg"))
    proof = module_of_pack("parallel_runtime.proof").Proof
    call_of = module_of_pack("parallel_runtime.model_call").ModelCall
    key = module_of_pack("parallel_runtime.planner.kept_plans").TriesKey(
        devices=(), driver="", torch="", comfyui="", pack="", model="", weights="", kernels="", work=()
    )

    def make(
        seconds: dict[str, Any],
        *,
        rows: int = 1,
        proofs: dict[str, str] | None = None,
        kept: Any = None,
        graphs: tuple[float, dict[str, Any]] = (0.0, {}),
    ) -> SimpleNamespace:
        asked: list[tuple[str, Any]] = []
        told: list[str] = []
        retracted: list[int] = []

        class Workers:
            def run(self, spec: object, plan: Any, calls: Any, check_cancelled: Any, **_: object) -> SimpleNamespace:
                check_cancelled()
                asked.append((plan.name, {**calls[0].options, "place": calls[0].place}))
                took = seconds[plan.name]
                if isinstance(took, Exception):
                    raise took
                out, ran = torch.full((1, 4), 3.0), SimpleNamespace(compiled=None)
                if calls[0].options.get("graphs"):
                    took, told = graphs
                    out = out + told.get("outs", 0.0)
                    ran.compiled = SimpleNamespace(**{"uncompiled_blocks": 0, "reason": "", **told})
                given = {"ranks": [], "ran": [ran], "compile_s": 0.0, "traces": {}}
                return SimpleNamespace(outs=[out], wall_s=took, **given)

            def retract_failure(self) -> None:
                retracted.append(1)

        class Listener(module_of_pack("nodes.host.sampling.step_listener").StepListener):
            def tried(self, decision: Any, line: str) -> None:
                told.append(line)

        class Prover:
            num_computed = 0

            def check(self, run: Any, call: Any, check_cancelled: object, *, looks: bool = True) -> None:
                verdict = (proofs or {}).get(run.plan.name, "proven")
                if verdict == "refused":
                    run.fall_back(replace(run.decision, plan=plan_of()), "refused")
                else:
                    run.note(proof(verdict=verdict, error=0.0, control=1.0, tolerance=1.0))

        prover = Prover()
        prover.transformer = None
        run = new_run("/a.safetensors")
        model = SimpleNamespace(pool=Workers(), spec=run.model.spec, devices=(), keeps_state=False)
        decision = replace(run.decision, plan=ulysses, automatic=True)
        run = replace(run, model=model, decision=decision, listener=Listener(), recorder=None, prover=prover, steps=2)
        plans = (ulysses, ring, cfg) if kept is None else tuple(kept.plans)
        run.trier = trier = trying.Trier(key=key, plans=plans, rows=rows, prover=prover, kept=kept)
        call = call_of(
            tensors={"t0": torch.zeros(1, 4)},
            out_shape=(1, 4),
            options={"call": {"d": {}}, "method": None, "timed": True, "step_cache": 0.5},
        )

        def step(check: Callable[[], None] = lambda: None) -> None:
            run.call(call, check_cancelled=check)

        return SimpleNamespace(
            run=run, trier=trier, step=step, asked=asked, told=told, retracted=retracted, key=key, errors=errors,
            call=call, prover=prover, plans=SimpleNamespace(uly2=ulysses, ring2=ring, cfg2=cfg), store=trying.store(),
        )  # fmt: skip

    return make


def names(found: SimpleNamespace) -> list[str]:
    return [name.split("-")[0] for name, _ in found.asked]


SECONDS = {"uly2": 1.0, "ring2": 0.5, "cfg2-ring1-uly1": 2.0}


def test_the_run_goes_on_under_the_quickest_which_is_kept_and_nothing_of_a_copy_is_recorded(case) -> None:
    found = case(SECONDS)
    found.step()
    assert found.told == ["tried ulysses 2: 0.50x, cfg 2: 0.25x, kept ring 2"]
    assert names(found) == ["uly2"] * 2 + ["ring2"] * 2 + ["cfg2"] * 2 + ["ring2"]  # a copy uncounted, one counted
    for _, options in found.asked[:-1]:
        assert (options["timed"], options["step_cache"], options["place"]) == (False, 0.0, None)
    assert found.asked[-1][1]["step_cache"] == 0.5 and found.run.step_seconds == [0.5]
    assert found.run.plan == found.plans.ring2
    kept = found.store.load(found.key)
    assert kept.plan == found.plans.ring2 and kept.seconds[found.plans.uly2] == 1.0
    found.step()
    assert names(found)[-1] == "ring2" and len(found.asked) == 8  # once a run


@pytest.mark.parametrize(
    ("graphs_s", "kind", "line"),
    [
        (0.4, {}, "kept ring 2 with graphs of blocks"),
        (0.49, {}, "graphs of blocks: 1.02x, kept ring 2"),
        (0.4, {"reason": "the model keeps something"}, "cfg 2: 0.25x, kept ring 2"),
        (0.4, {"uncompiled_blocks": 1}, "cfg 2: 0.25x, kept ring 2"),
        (0.4, {"outs": 1.0}, "cfg 2: 0.25x, kept ring 2"),  # another result than without
    ],
)
def test_blocks_run_as_graphs_where_all_did_gained_and_computed_the_same(graphs_s, kind, line, case) -> None:
    found = case(SECONDS, graphs=(graphs_s, kind))
    found.trier.graphs, found.trier.budget_s = frozenset([found.plans.ring2]), 60.0
    found.step()
    assert found.told[0].endswith(line)
    asked = [options.get("graphs", False) for name, options in found.asked if name.startswith("ring2")]
    made = len(asked) - 3  # two copies without, and the run's own step
    assert asked == [False] * 2 + [True] * made + [line.endswith("graphs of blocks")]
    assert found.store.load(found.key).by_graphs is asked[-1]


def test_a_plan_alone_is_tried_with_graphs_which_the_next_run_begins_with_and_a_fallback_leaves(case, trying) -> None:
    found = case(SECONDS, graphs=(0.9, {}))
    found.trier.plans, found.trier.graphs = (found.plans.uly2,), frozenset([found.plans.uly2])
    found.step()
    assert not found.told, "only Tune, which gives a budget, has graphs made"
    found = case(SECONDS, graphs=(0.9, {}))
    found.trier.plans, found.trier.graphs = (found.plans.uly2,), frozenset([found.plans.uly2])
    found.trier.budget_s = 60.0
    found.step()
    assert found.told == ["tried graphs of blocks: 1.11x, kept ulysses 2 with graphs of blocks"]
    assert found.asked[-1][1]["graphs"] is True
    given = {"key": found.key, "plans": (), "rows": 1, "prover": found.prover, "kept": found.store.load(found.key)}
    assert trying.Trier(**given, graphs=found.trier.graphs).by_graphs and not trying.Trier(**given).by_graphs
    found.run.fall_back(replace(found.run.decision, plan=found.plans.ring2), "so")
    found.step()
    assert "graphs" not in found.asked[-1][1]


def test_where_the_proof_was_the_first_copy_it_is_not_made_again(case) -> None:
    found = case(SECONDS)
    found.run.prover.num_computed += 1
    found.step()
    assert names(found).count("uly2") == 1


@pytest.mark.parametrize("kind", ["OutOfMemoryInRankError", "RaisedInRankError", "PoolError", "SilentWorkersError"])
def test_a_plan_that_fails_is_kept_out_said_once_and_the_run_goes_on(kind: str, case, caplog) -> None:
    error = getattr(case(SECONDS).errors, kind)("it broke in /home/me/x.py", rank=1)
    found = case({**SECONDS, "ring2": error})
    found.step()
    said = "out of memory" if kind.startswith("OutOf") else "it broke in x.py)"
    assert said in found.told[0] and found.told[0].endswith("kept ulysses 2") and "/home/me" not in found.told[0]
    assert len([each for each in caplog.records if "is kept out" in each.getMessage()]) == 1
    assert found.retracted == [1] and names(found).count("ring2") == 1 and names(found)[-1] == "uly2"
    assert list(found.store.load(found.key).failed) == [found.plans.ring2]


@pytest.mark.parametrize(("starts_again_s", "tried"), [(0.5, ["uly2", "ring2", "cfg2"]), (1.25, ["uly2", "ring2"])])
def test_what_a_plan_that_fails_takes_counts_as_time_that_the_run_waits(
    starts_again_s: float, tried: list[str], case, trying, monkeypatch
) -> None:
    error = case({}).errors.PoolError("lost")
    found = case({"uly2": 1.0, "ring2": error, "cfg2-ring1-uly1": 1.0})
    found.trier.limit, found.trier.asynchronous = 3.0, False
    loaded: list[object] = []
    found.run.model.pool.load = lambda *asked, **_: loaded.append(asked)

    def now() -> float:  # a second a copy, half of one for that which fails
        return len(found.asked) - 0.5 * len(found.retracted) + starts_again_s * len(loaded)

    monkeypatch.setattr(trying, "time", SimpleNamespace(perf_counter=now))
    found.step()
    assert names(found) == [*tried, "uly2"] and "ring 2: failed (lost)" in found.told[0]
    assert found.trier.tries.spent_s <= 3.0


def test_cancel_in_a_try_ends_the_run_and_keeps_nothing(case) -> None:
    found, asked = case(SECONDS), []

    def check() -> None:
        asked.append(1)
        if len(asked) == 4:
            raise CancelledError

    with pytest.raises(CancelledError):
        found.step(check)
    assert found.store.load(found.key) is None and not found.told and found.run.plan == found.plans.uly2


def test_with_no_time_left_no_copy_begins_and_nothing_is_kept(case, trying, monkeypatch) -> None:
    found = case(SECONDS)
    found.trier.budget_s = 0.0
    found.step()
    assert names(found) == ["uly2"] and found.store.load(found.key) is None and not found.told

    found, clock = case({**SECONDS, "uly2": 0.51}), itertools.count(0, 1 / 3)  # of a second at each look, three a copy
    monkeypatch.setattr(trying, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    found.trier.budget_s = 6.0
    found.step()
    assert names(found) == ["uly2"] * 2 + ["ring2"] * 2 + ["cfg2"] * 2 + ["uly2"]  # of those near one copy is due
    assert found.store.load(found.key) is None and not found.told


def test_of_a_part_of_a_step_plans_that_share_out_the_parts_are_not_tried(case) -> None:
    found = case(SECONDS, rows=2)
    found.step()
    assert "cfg2" not in names(found) and found.run.plan == found.plans.ring2


@pytest.mark.parametrize("verdict", ["refused", "not proven"])
def test_a_quicker_plan_that_is_less_proven_is_kept_out(verdict: str, case) -> None:
    found = case(SECONDS, proofs={"ring2": verdict})
    found.step()
    assert found.run.plan == found.plans.uly2 and not found.run.remarks
    assert found.told == ["tried cfg 2: 0.50x, ring 2: not proven to compute the same, kept ulysses 2"]


@pytest.mark.parametrize(("steps", "known", "at_once"), [(4, False, False), (4, True, True), (40, False, True)])
def test_a_quicker_plan_whose_proof_would_take_the_run_too_long_is_the_next_runs(
    steps: int, known: bool, at_once: bool, case, trying, monkeypatch
) -> None:
    found = case(SECONDS | {"ring2": 0.9, "cfg2-ring1-uly1": 1.1})
    found.trier.limit, found.trier.asynchronous, found.run.steps = 3.0, False, steps
    found.prover.knows = lambda plan, call: known
    monkeypatch.setattr(trying, "time", SimpleNamespace(perf_counter=lambda: len(found.asked)))
    found.step()
    line = "tried ulysses 2: 0.90x, cfg 2: 0.82x, kept ring 2"
    assert found.told == [line if at_once else f"{line} from the next run on"]
    assert found.run.plan == (found.plans.ring2 if at_once else found.plans.uly2)
    assert names(found)[-1] == ("ring2" if at_once else "uly2")
    kept = found.store.load(found.key)
    assert kept.plan == found.plans.ring2
    found.trier.after(found.run)
    given = {"key": found.key, "plans": (), "rows": 1, "prover": found.prover, "kept": kept}
    trying.Trier(**given).after(replace(found.run, decision=replace(found.run.decision, plan=found.plans.cfg2)))
    left = found.store.load(found.key)  # the next run began under it, and its proof failed
    assert (left.plan, list(left.failed)) == (found.plans.uly2, [found.plans.ring2])


def test_a_plan_whose_proof_finds_no_memory_is_kept_out_and_the_run_goes_on(case) -> None:
    found = case(SECONDS)
    check = found.prover.check

    def checked(run: Any, *told: Any, looks: bool = True) -> None:
        if run.plan == found.plans.ring2:
            raise found.errors.OutOfMemoryInRankError("no memory", rank=1)
        check(run, *told, looks=looks)

    found.prover.check = checked
    found.step()
    assert found.told == ["tried cfg 2: 0.50x, ring 2: out of memory, kept ulysses 2"] and found.retracted == [1]


def test_all_plans_that_fail_leave_the_run_as_it_was(case) -> None:
    error = case({}).errors.PoolError("lost")
    found = case({name: error for name in SECONDS})
    with pytest.raises(found.errors.PoolError):  # by the step itself
        found.step()
    assert found.store.load(found.key) is None and found.run.plan == found.plans.uly2


def test_runs_that_come_to_be_slower_have_plans_tried_again(case, module_of_pack) -> None:
    kept_plan = module_of_pack("parallel_runtime.planner.tries").KeptPlan
    found = case(SECONDS)
    plans = found.plans
    kept = kept_plan(plan=plans.uly2, seconds={plans.uly2: 0.4, plans.ring2: 0.5}, expected_s=0.4)
    found.trier.kept, found.trier.plans = kept, ()
    found.step()
    found.step()
    found.trier.after(found.run)
    stored = found.store.load(found.key)
    assert stored.again and stored.plan == plans.uly2 and names(found) == ["uly2", "uly2"]
    found = case(SECONDS, kept=stored)
    found.step()
    assert found.told == ["changed from ulysses 2 to ring 2, measured again: 2.00x as fast"]
    assert not found.store.load(found.key).again


@pytest.fixture
def tuned(case, module_of_pack, monkeypatch) -> Callable[..., Any]:
    """What tuning answers, and the case, where steps take so long and are predicted to take `predicted`."""
    tuning = module_of_pack("nodes.host.proof.tuning")
    planner = {
        name: module_of_pack(f"parallel_runtime.planner.{name}") for name in ("choose", "cost", "memory", "work")
    }

    def run(
        takes: dict[str, Any], predicted: dict[str, float], check: Callable[[], None] = lambda: None, **asked: Any
    ) -> tuple[dict, SimpleNamespace]:
        found, rows = case(takes), []
        for name, step_s in predicted.items():
            parts = {"compute_s": step_s, "communication_s": 0.0, "launch_s": 0.0, "warmup_step_s": step_s}
            cost = planner["cost"].Cost(step_s=step_s, **parts)
            planned = planner["memory"].PlannedMemory
            memory = planned(**{each.name: 0 for each in fields(planned)})
            plan = getattr(found.plans, name)
            rows.append(planner["choose"].Prediction(plan=plan, cost=cost, memory=memory, run_s=step_s, fits=True))
        decision = replace(found.run.decision, plan=rows[0].plan, table=tuple(rows))
        work = planner["work"].Work(image_tokens=20, text_tokens=256)
        monkeypatch.setattr(tuning, "made_up", lambda *_: (found.call, work))
        monkeypatch.setattr(tuning, "key_of", lambda *_: found.key)
        pooled = SimpleNamespace(**{**vars(found.run.model), "devices": (SimpleNamespace(kind="cpu"),)})
        of = SimpleNamespace(
            why_not="", pooled=pooled, prover=found.run.prover, choose_again=lambda _: decision, shares=(),
            table=lambda _: rows, deltas=found.run.deltas, compiled=False, attention="", step_cache=0.0,
            exchange="exact",
        )  # fmt: skip
        return tuning.tune(of, tuning.Asked(**asked), say=lambda _: None, check=check), found

    return run


NEAR = {"uly2": 1.0, "ring2": 1.1, "cfg2": 1.2}


@pytest.mark.parametrize(
    ("seconds", "line", "kept", "tried"),
    [
        (60, "tried ulysses 2: 0.50x, cfg 2: 0.25x, kept ring 2", "ring=2", 3),
        (7, "tried ulysses 2: 0.50x, kept ring 2; not tried for lack of time: cfg 2 (all are predicted to take 10 s)",
         "ring=2", 2),
        (1, "1 s is too little: to try ulysses 2 and ring 2 is predicted to take 6.3 s; nothing is kept", None, 0),
    ],
)  # fmt: skip
def test_a_budget_is_for_the_most_promising_plans(seconds: float, line: str, kept: object, tried: int, tuned) -> None:
    told, found = tuned(SECONDS, NEAR, seconds=seconds)
    assert (told["line"], told["kept"]) == (line, kept)
    assert len(set(names(found))) == tried and (found.store.load(found.key) is not None) == bool(kept)
    assert [row["name"] for row in told["plans"]] == ["ulysses 2", "ring 2", "cfg 2"]


def test_a_plan_that_fails_while_it_is_tuned_is_named_and_a_stop_keeps_nothing(
    tuned, case, module_of_pack, monkeypatch
) -> None:
    lost = case({}).errors.OutOfMemoryInRankError("no memory", rank=1)
    told, _ = tuned({**SECONDS, "ring2": lost}, NEAR)
    assert told["line"] == "tried cfg 2: 0.50x, ring 2: out of memory, kept ulysses 2"
    told, found = tuned(dict.fromkeys(SECONDS, lost), NEAR)
    assert told["kept"] is None and told["line"].startswith("ulysses 2: out of memory; ")
    told, _ = tuned(SECONDS, {"uly2": 1.0, "ring2": 2.0})
    assert told["line"] == "nothing to try: no other exact plan is predicted to be near ulysses 2"
    monkeypatch.setattr(module_of_pack("nodes.host.proof.tuning"), "under_graphs", lambda *_: {case({}).plans.uly2})
    told, _ = tuned(SECONDS, {"uly2": 1.0, "ring2": 2.0}, seconds=1)  # that plan's graphs of blocks
    assert told["line"] == "1 s is too little: to try ulysses 2 is predicted to take 3.0 s; nothing is kept"

    looks: list[int] = []

    def stop() -> None:
        looks.append(1)
        if len(looks) > 5:
            raise CancelledError

    found.store.path.unlink(missing_ok=True)
    with pytest.raises(CancelledError):
        tuned(SECONDS, NEAR, stop)
    assert found.store.load(found.key) is None


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("width", 16, 16384), ("frames", 1, 4096), ("text_tokens", 1, 8192), ("batch", 1, 64), ("seconds", 1, 3600)],
)
def test_what_is_tuned_has_sizes_in_their_ranges(name: str, low: int, high: int, module_of_pack) -> None:
    asked = module_of_pack("nodes.host.proof.tuning").Asked
    for size in (low, high):
        assert getattr(asked(**{name: size}), name) == size
    for size in (low - 1, high + 1):
        with pytest.raises(ValueError, match=f"{name}={size} is outside {low} to {high}; use a number"):
            asked(**{name: size})


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
        monkeypatch.setattr(begin, name, lambda *_, value=value: value)
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


def test_graphs_are_left_off_where_their_memory_does_not_fit(module_of_pack, new_run, monkeypatch) -> None:
    begin, plan = module_of_pack("nodes.host.proof.begin_tries"), module_of_pack("parallel_runtime.plan").ParallelPlan
    choose, cost, memory, work, devices = (
        module_of_pack(f"parallel_runtime.{name}")
        for name in ("planner.choose", "planner.cost", "planner.memory", "planner.work", "devices")
    )
    monkeypatch.setattr(begin, "whole_bytes", lambda _: [1000, 1000])
    given = {each.name: None for each in fields(begin.Tunable)} | {"deltas": begin.PRISTINE, "shares": ()}
    of = begin.Tunable(**given | {"pooled": SimpleNamespace(devices=(devices.Device("cuda", 0),) * 2)})
    parts = cost.Cost(step_s=1.0, compute_s=0.5, communication_s=0.0, launch_s=0.5, warmup_step_s=1.0)
    sampled = work.Work(image_tokens=20, text_tokens=4, steps=20)
    for graphs, shares, left in ((50, (), True), (51, (), False), (50, (3, 1), False)):
        planned = memory.PlannedMemory(weights=800, activations=100, buffers=0, runtime=0, graphs=graphs)
        row = choose.Prediction(plan=plan(ulysses=2), cost=parts, memory=planned, run_s=20.0, fits=True)
        assert begin.under_graphs(replace(of, shares=shares), [row], sampled) == ({row.plan} if left else set())


def test_stop_a_prompt_and_what_fails_end_the_buttons_tuning_with_a_sentence(module_of_pack, monkeypatch, case) -> None:
    panel = module_of_pack("nodes.host.panel.tuning")
    queue = SimpleNamespace(currently_running={})
    monkeypatch.setattr(panel, "PromptServer", SimpleNamespace(instance=SimpleNamespace(prompt_queue=queue)))
    monkeypatch.setattr(panel, "comfy", MagicMock())
    of = SimpleNamespace(pooled=MagicMock(), why_not="")
    monkeypatch.setattr(panel, "last_run", lambda: SimpleNamespace(of=of, described={}))
    button, happens = panel.TuneButton(), [lambda: None]
    assert button.state() == {"state": "never", "of": {}}

    def tune(of: object, asked: object, *, say: Callable, check: Callable) -> dict[str, Any]:
        say("trying ring 2")
        assert button.state() == {"state": "running", "doing": "trying ring 2", "of": {}}
        happens[0]()
        check()
        return {"line": "kept ring 2", "kept": "ring=2", "plans": [], "work": "", "took_s": 1.0, "copies": 4}

    def lost() -> None:
        raise case({}).errors.PoolError("rank 1 was lost\nmore")

    monkeypatch.setattr(panel, "tune", tune)
    for each, said in (
        (lambda: None, "kept ring 2"),
        (button.stop, "stopped; nothing is kept"),
        (lambda: queue.currently_running.update(a=1), "ended, as a prompt began; nothing is kept"),
        (lost, "rank 1 was lost"),
    ):
        happens[0] = each
        button.work(panel.Asked())()
        done = {"line": said, "kept": "ring=2", "plans": [], "work": "", "took_s": 1.0, "copies": 4}
        assert button.told == (
            {"state": "done", **done} if said == "kept ring 2" else {"state": "failed", "message": said}
        )
        queue.currently_running.clear()
    happens[0] = lambda: {}["no such"]
    with pytest.raises(KeyError):
        button.work(panel.Asked())()
    assert button.told == {"state": "failed", "message": "it failed; ComfyUI's log says why"}
    assert of.pooled.give_back.call_count == 5
    monkeypatch.setattr(panel, "last_run", lambda: None)
    button.work(panel.Asked())()
    assert button.state() == {"state": "failed", "message": panel.NOTHING_LOADED, "of": None}


def test_the_button_tunes_what_was_loaded_last_while_the_workers_have_it(module_of_pack, monkeypatch) -> None:
    panel = module_of_pack("nodes.host.panel.tuning")
    of = SimpleNamespace(pooled=SimpleNamespace(holds=lambda plan: plan == "held"), decision=SimpleNamespace(plan=""))
    run = SimpleNamespace(of=of)
    for loaded, plan, found in ((None, "held", None), (None, "", None), (run, "held", run), (run, "gone", None)):
        of.decision.plan = plan
        root = SimpleNamespace(model=SimpleNamespace(last_run=loaded)) if plan else None
        monkeypatch.setattr(panel, "POOLS", SimpleNamespace(last_loaded=root))
        assert panel.last_run() is found


def test_the_first_line_of_the_drivers_version_is_kept_with_tries(module_of_pack, monkeypatch, tmp_path) -> None:
    begin = module_of_pack("nodes.host.proof.begin_tries")
    for content, said in ((b" NVRM 570.1 \nGCC 12\n", "NVRM 570.1"), (b"", ""), (b"\xff", ""), (None, "")):
        monkeypatch.setattr(begin, "DRIVER", file := tmp_path / f"version {said} {content is None}")
        if content is not None:
            file.write_bytes(content)
        assert begin._driver.__wrapped__() == said
