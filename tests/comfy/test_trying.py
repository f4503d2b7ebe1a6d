"""Tries over a pool that does what a test says: plans that fail, Cancel, a part of a step, and an unproven plan.

Owns: what `Trier` does with what happens in a try. Does not own the rules (planner/test_tries.py) nor a whole graph
(test_tries.py).
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

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
        spread: bool = False,
        kept: Any = None,
        graphs: tuple[Any, dict[str, Any]] = (1.0, {}),
    ) -> SimpleNamespace:
        asked: list[tuple[str, Any]] = []
        told: list[str] = []
        retracted: list[int] = []

        class Workers:
            def run(self, spec: object, plan: Any, calls: Any, check_cancelled: Any, **_: object) -> SimpleNamespace:
                check_cancelled()
                asked.append((plan.name, {**calls[0].options, "place": calls[0].place}))
                by_graphs = bool(calls[0].options.get("graphs"))
                took = graphs[0] if by_graphs else seconds[plan.name]
                took = took.pop(0) if isinstance(took, list) else took
                if isinstance(took, Exception):
                    raise took
                out, ran = torch.full((1, 4), 3.0), SimpleNamespace(compiled=None)
                if by_graphs:
                    out = out + graphs[1].get("outs", 0.0)
                    ran.compiled = SimpleNamespace(**{"uncompiled_blocks": 0, "reason": "", **graphs[1]})
                given = {"ranks": [], "ran": [ran], "compile_s": 0.0, "traces": {}}
                return SimpleNamespace(outs=[out], wall_s=took, **given)

            def retract_failure(self) -> None:
                retracted.append(1)

        class Listener(module_of_pack("nodes.host.sampling.step_listener").StepListener):
            def tried(self, decision: Any, line: str) -> None:
                told.append(line)

        class Prover:
            num_computed, gone = 0, False

            def check(self, run: Any, call: Any, check_cancelled: Callable[[], None], *, looks: bool = True) -> None:
                check_cancelled()
                verdict = (proofs or {}).get(run.plan.name, "proven")
                if verdict == "refused":  # weights that are spread over ranks stay so, and the plan stays then
                    run.fall_back(run.decision if spread else replace(run.decision, plan=plan_of()), "refused")
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
    found.trier.graphs = frozenset([found.plans.ring2])
    found.step()
    assert found.told[0].endswith(line)
    asked = [options.get("graphs", False) for name, options in found.asked if name.startswith("ring2")]
    made = asked.count(True) - asked[-1]
    assert asked[-made - 1 :] == [True] * made + [line.endswith("graphs of blocks")], "after all copies without"
    assert made == (1 if "outs" in kind else 4)
    assert found.store.load(found.key).by_graphs is asked[-1]


def test_of_copies_by_graphs_the_slower_of_the_last_two_counts(case) -> None:
    """The two before make them."""
    found = case(SECONDS, graphs=([9.0, 9.0, 0.3, 0.4, 0.3], {}))
    found.trier.graphs = frozenset([found.plans.ring2])
    found.step()
    assert found.store.load(found.key).graphs_s == {found.plans.ring2: 0.4}


def test_of_all_plans_that_may_gain_by_graphs_the_quickest_by_them_is_kept(case) -> None:
    found = case({"uly2": 1.0, "ring2": 1.5, "cfg2-ring1-uly1": 2.0}, graphs=(0.3, {}))
    found.trier.graphs = frozenset([found.plans.cfg2])
    found.step()
    assert found.told == [
        "tried ulysses 2: 0.30x, ring 2: 0.20x, graphs of blocks: 6.67x, kept cfg 2 with graphs of blocks"
    ]
    assert found.asked[-1][0].startswith("cfg2") and found.asked[-1][1]["graphs"] is True


def test_where_workers_fail_by_graphs_the_quickest_without_is_kept_and_no_others_are_made(case, trying, caplog) -> None:
    errors = case(SECONDS).errors
    found = case(SECONDS, graphs=(errors.PoolError("it broke"), {}))
    found.trier.graphs = frozenset([found.plans.ring2, found.plans.cfg2])
    found.step()
    assert found.told == ["tried ulysses 2: 0.50x, cfg 2: 0.25x, kept ring 2"]
    assert sum(options.get("graphs", False) for _, options in found.asked) == 1 and found.retracted == [1]
    assert found.trier.tries.lost and not found.store.load(found.key).graphs_s
    assert "graphs of blocks were tried and are not used: failed (it broke)" in caplog.text
    found.store.path.unlink()
    second = case(SECONDS, graphs=([*[0.4] * trying.GRAPH_COPIES, errors.PoolError("it broke"), 0.4], {}))
    second.trier.graphs = frozenset([second.plans.ring2, second.plans.cfg2])
    second.step()
    assert sorted(second.trier.tries.graphs_s.values()) == [0.4, math.inf], "what was tried before stays"


def test_a_kept_plan_that_a_run_gave_up_leaves_the_next_best_by_graphs_too(case, module_of_pack) -> None:
    kept_plan = module_of_pack("parallel_runtime.planner.tries").KeptPlan
    found = case(SECONDS)
    uly2, ring2, cfg2 = found.plans.uly2, found.plans.ring2, found.plans.cfg2
    found.trier.kept = kept_plan(
        plan=uly2, seconds={uly2: 0.4, ring2: 0.9, cfg2: 1.2}, graphs_s={cfg2: 0.5}, expected_s=0.4, again=True
    )
    found.run.fall_back(replace(found.run.decision, plan=ring2), "refused")
    found.trier.after(found.run)
    left = found.store.load(found.key)
    assert (left.plan, left.expected_s, left.again, list(left.seconds)) == (cfg2, 0.5, False, [ring2, cfg2])
    assert left.failed == {uly2: "not proven to compute the same"}


@pytest.mark.parametrize("ends", ["a failure", "another result", "no time"])
def test_graphs_that_were_kept_stay_where_there_is_no_time_to_try_them_again_and_go_where_they_fail(
    ends: str, case, trying, module_of_pack, monkeypatch
) -> None:
    kept_plan = module_of_pack("parallel_runtime.planner.tries").KeptPlan
    plans = case(SECONDS).plans
    was = {"plan": plans.uly2, "seconds": {plans.uly2: 1.0, plans.ring2: 1.0}, "graphs_s": {plans.uly2: 0.4}}
    by_graphs = (case({}).errors.PoolError("it broke"), {}) if ends == "a failure" else (0.4, {"outs": 1.0})
    found = case(SECONDS, kept=kept_plan(**was, expected_s=0.4), graphs=by_graphs)
    found.trier.graphs = frozenset([plans.uly2])
    if ends == "no time":
        monkeypatch.setattr(trying, "time", SimpleNamespace(perf_counter=lambda: 1.0 * len(found.asked)))
        found.trier.budget_s = 3.5
    found.step()
    kept = found.store.load(found.key)
    assert (kept.plan, kept.by_graphs) == ((plans.uly2, True) if ends == "no time" else (plans.ring2, False))
    assert kept.graphs_s == (was["graphs_s"] if ends == "no time" else {})


def test_a_plan_that_was_tried_alone_is_tried_again_with_the_others(case) -> None:
    for alone in (False, True):
        found = case(SECONDS, graphs=(0.5, {}))
        found.trier.plans, found.trier.graphs = (found.plans.uly2,), frozenset([found.plans.uly2])
        found.trier.alone = alone
        found.step()
        kept = found.store.load(found.key)
        assert (kept.by_graphs, kept.again) == (True, alone)


def test_no_copy_by_graphs_begins_once_a_budget_is_spent(case, trying, monkeypatch) -> None:
    found = case(SECONDS, graphs=(0.1, {}))
    monkeypatch.setattr(trying, "time", SimpleNamespace(perf_counter=lambda: 1.0 * len(found.asked)))
    found.trier.graphs, found.trier.budget_s = frozenset([found.plans.ring2, found.plans.cfg2]), 7.0
    found.step()
    graphed = [name.split("-")[0] for name, options in found.asked[:-1] if options.get("graphs")]
    kept = found.store.load(found.key)
    assert graphed == ["ring2"] * 4 and kept.plan == found.plans.ring2
    assert kept.again, "for the other there was no time"


def test_a_plan_alone_is_tried_with_graphs_which_the_next_run_begins_with_and_a_fallback_leaves(case, trying) -> None:
    found = case(SECONDS, graphs=(0.9, {}))
    found.trier.plans, found.trier.graphs = (found.plans.uly2,), frozenset([found.plans.uly2])
    found.trier.limit = 3.0
    found.step()
    assert not found.told, "no run waits for graphs"
    found = case(SECONDS, graphs=(0.9, {}))
    found.trier.plans, found.trier.graphs = (found.plans.uly2,), frozenset([found.plans.uly2])
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


@pytest.mark.parametrize(("verdict", "spread"), [("refused", False), ("refused", True), ("not proven", False)])
def test_a_quicker_plan_that_is_less_proven_is_kept_out(verdict: str, spread: bool, case) -> None:
    found = case(SECONDS, proofs={"ring2": verdict}, spread=spread)
    found.step()
    assert found.run.plan == found.plans.uly2 and not found.run.remarks
    assert found.told == ["tried cfg 2: 0.50x, ring 2: not proven to compute the same, kept ulysses 2"]


@pytest.mark.parametrize(
    ("steps", "known", "keeps", "at_once"),
    [
        *((4, False, False, False), (4, True, False, True), (40, False, False, True)),
        *((60, False, True, False), (90, False, True, True)),  # each call of a proof twice
    ],
)
def test_a_quicker_plan_whose_proof_would_take_the_run_too_long_is_the_next_runs(
    steps: int, known: bool, keeps: bool, at_once: bool, case, trying, monkeypatch
) -> None:
    found = case(SECONDS | {"ring2": 0.9, "cfg2-ring1-uly1": 1.1})
    found.trier.limit, found.trier.asynchronous, found.run.steps = 3.0, False, steps
    found.prover.knows, found.run.model.keeps_state = (lambda plan, call: known), keeps
    monkeypatch.setattr(trying, "time", SimpleNamespace(perf_counter=lambda: len(found.asked)))
    found.step()
    line = f"tried ulysses 2: 0.90x,{'' if keeps else ' cfg 2: 0.82x,'} kept ring 2"  # copies took longer, too
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
