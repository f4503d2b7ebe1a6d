"""Tuning over a pool that does what a test says: its budget, what fails, a stop, and the button that asks for it.

Does not own what happens in a try (test_trying.py) nor a whole graph (test_tuning.py).
"""

import time
from collections.abc import Callable
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from comfy.test_run_context import new_run as new_run
from comfy.test_run_context import run_context as run_context
from comfy.test_trying import SECONDS, CancelledError, names
from comfy.test_trying import case as case
from comfy.test_trying import trying as trying


@pytest.fixture
def tuned(case, module_of_pack, monkeypatch) -> Callable[..., Any]:
    """What tuning answers, and the case, where steps take so long and are predicted to take `predicted`."""
    tuning = module_of_pack("nodes.host.proof.tuning")
    planner = {
        name: module_of_pack(f"parallel_runtime.planner.{name}") for name in ("choose", "cost", "memory", "work")
    }

    def run(
        takes: dict[str, Any],
        predicted: dict[str, float],
        check: Callable[[], None] = lambda: None,
        *,
        proofs: dict[str, str] | None = None,
        holds: Callable[[object], bool] = lambda _: True,
        graphs: tuple[Any, dict[str, Any]] = (1.0, {}),
        **asked: Any,
    ) -> tuple[dict, SimpleNamespace]:
        found, rows = case(takes, proofs=proofs, spread=True, graphs=graphs), []
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
        monkeypatch.setattr(tuning, "key_of", lambda *_, **__: found.key)
        pooled = SimpleNamespace(**{**vars(found.run.model), "devices": (SimpleNamespace(kind="cpu"),), "holds": holds})
        of = SimpleNamespace(
            why_not="", pooled=pooled, prover=found.run.prover, choose_again=lambda _: decision, shares=(),
            table=lambda _: rows, deltas=found.run.deltas, compiled=False, attention="", step_cache=0.0,
            exchange="exact",
        )  # fmt: skip
        return tuning.tune(of, tuning.TuningRequest(**asked), say=lambda _: None, check=check), found

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
    began_s = time.perf_counter()
    told, found = tuned(SECONDS, NEAR, seconds=seconds)
    assert (told["line"], told["kept"]) == (line, kept)
    assert 0 <= told["took_s"] <= time.perf_counter() - began_s
    assert len(set(names(found))) == tried and (found.store.load(found.key) is not None) == bool(kept)
    assert [row["name"] for row in told["plans"]] == ["ulysses 2", "ring 2", "cfg 2"]


def test_plans_that_are_predicted_to_take_just_the_budget_are_tried(tuned, module_of_pack, monkeypatch) -> None:
    monkeypatch.setattr(module_of_pack("nodes.host.proof.tuning"), "tried_in_s", lambda *_, **__: (3.0, 60.0, 61.0))
    told, found = tuned(SECONDS, NEAR, seconds=60)
    assert set(names(found)) == {"uly2", "ring2"} and told["line"].endswith("cfg 2 (all are predicted to take 61 s)")


@pytest.mark.parametrize(("kind", "graphs_s"), [({}, 0.4), ({"reason": "the model keeps something"}, None)])
def test_a_row_has_the_seconds_by_graphs_where_all_blocks_ran_as_such(
    kind, graphs_s, tuned, case, module_of_pack, monkeypatch
) -> None:
    ring2 = case({}).plans.ring2
    monkeypatch.setattr(module_of_pack("nodes.host.proof.tuning"), "under_graphs", lambda *_: {ring2})
    told, _ = tuned(SECONDS, NEAR, graphs=(0.4, kind))
    found = [(row["name"], row["step_s"], row["graphs_s"]) for row in told["plans"]]
    assert found == [("ulysses 2", 1.0, None), ("ring 2", 0.5, graphs_s), ("cfg 2", 2.0, None)]


def test_what_cannot_be_written_is_not_said_to_be_kept(tuned, case) -> None:
    case({}).store.path.mkdir(parents=True)
    told, _ = tuned(SECONDS, NEAR)
    assert told["kept"] is None and told["line"].startswith(
        "tried ulysses 2: 0.50x, cfg 2: 0.25x, kept ring 2; no run has"
    )


def test_what_is_tuned_may_have_graphs_as_runs_of_the_model_may(module_of_pack, monkeypatch) -> None:
    tuning = module_of_pack("nodes.host.proof.tuning")
    usual = module_of_pack("parallel_runtime.planner.work").Work(image_tokens=20, text_tokens=4)
    process = MagicMock()
    process.__enter__.return_value.ask.return_value = {"out_shape": [1, 4], "options": {}, "numbers": 4}
    monkeypatch.setattr(tuning, "ComfyUIProcess", lambda *_, **__: process)
    monkeypatch.setattr(tuning, "load_file", lambda _: {"t0": torch.zeros(1, 4)})
    for graphs, deltas, found in (
        (True, tuning.PRISTINE, True),
        (True, "a LoRA", False),
        (False, tuning.PRISTINE, False),
    ):
        decision = SimpleNamespace(work=replace(usual, graphs=graphs), model=SimpleNamespace(image_tokens=int))
        of = SimpleNamespace(decision=decision, pooled=MagicMock(), why_not="", deltas=deltas)
        assert tuning.made_up(of, tuning.TuningRequest(batch=3, guided=True))[1].graphs is found
        assert process.__enter__.return_value.ask.call_args.kwargs["size"]["batch"] == 6, "rows of both sides"


def test_where_the_runs_own_plan_is_refused_nothing_is_tuned_though_its_weights_stay(tuned) -> None:
    told, found = tuned(SECONDS, NEAR, seconds=60, proofs={"uly2": "refused"})
    assert (told["line"], told["kept"], names(found)) == ("refused", None, [])
    assert found.store.load(found.key) is None


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
    held = [True] * 4
    with pytest.raises(module_of_pack("nodes.host.proof.tuning").TuningEndedError, match="ComfyUI freed"):
        tuned(SECONDS, NEAR, holds=lambda _: bool(held) and held.pop())
    assert found.store.load(found.key) is None


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("width", 16, 16384), ("frames", 1, 4096), ("text_tokens", 1, 8192), ("batch", 1, 64), ("seconds", 1, 3600)],
)
def test_what_is_tuned_has_sizes_in_their_ranges(name: str, low: int, high: int, module_of_pack) -> None:
    asked = module_of_pack("nodes.host.proof.tuning").TuningRequest
    for size in (low, high):
        assert getattr(asked(**{name: size}), name) == size
    for size in (low - 1, high + 1, 1234567, 10**400):
        with pytest.raises(ValueError, match=f"{name}={size} is outside {low} to {high}; use a number"):
            asked(**{name: size})


def test_stop_a_prompt_and_what_fails_end_the_buttons_tuning_with_a_sentence(module_of_pack, monkeypatch, case) -> None:
    panel = module_of_pack("nodes.host.panel.tuning")
    queue = SimpleNamespace(currently_running={})
    monkeypatch.setattr(panel, "PromptServer", SimpleNamespace(instance=SimpleNamespace(prompt_queue=queue)))
    monkeypatch.setattr(panel, "comfy", MagicMock())
    of = SimpleNamespace(pooled=MagicMock(), why_not="")
    pool = of.pooled.pool
    monkeypatch.setattr(panel, "last_run", lambda: SimpleNamespace(of=of, described={"model": "a"}))
    button, happens = panel.TuneButton(), [lambda: None]
    assert button.state() == {"state": "never", "of": {"model": "a"}}

    def tune(of: object, asked: object, *, say: Callable, check: Callable) -> dict[str, Any]:
        say("trying ring 2")
        assert button.state() == {"state": "running", "doing": "trying ring 2", "of": {"model": "a"}}
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
        (
            lambda: setattr(pool, "is_waited_for", True),
            "ended, as the workers were asked for something else; nothing is kept",
        ),
        (lost, "rank 1 was lost"),
    ):
        happens[0], pool.is_waited_for = each, False
        button.work(panel.TuningRequest())()
        done = {"line": said, "kept": "ring=2", "plans": [], "work": "", "took_s": 1.0, "copies": 4}
        assert button.told == (
            {"state": "done", "model": "a", **done} if said == "kept ring 2" else {"state": "failed", "message": said}
        )
        queue.currently_running.clear()
    happens[0] = lambda: {}["no such"]
    with pytest.raises(KeyError):
        button.work(panel.TuningRequest())()
    assert button.told == {"state": "failed", "message": "it failed; ComfyUI's log says why"}
    assert of.pooled.give_back.call_count == 6
    context = module_of_pack("nodes.host.sampling.run_context")
    run = SimpleNamespace(model=of.pooled, late=None)
    with context.begun({}, SimpleNamespace(model=MagicMock(), late=None)), context.begun({}, run):
        happens[0] = button.stop
        button.work(panel.TuningRequest())()
    assert of.pooled.give_back.call_count == 6, "a run that has begun gives back itself"
    button.work(panel.TuningRequest())()
    assert of.pooled.give_back.call_count == 7
    monkeypatch.setattr(panel, "last_run", lambda: None)
    button.work(panel.TuningRequest())()
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


def test_a_budget_that_ends_before_a_plan_was_timed_says_what_would_do(
    tuned, case, module_of_pack, monkeypatch
) -> None:
    made, module = case({}).plans, module_of_pack("nodes.host.proof.tuning")
    tries = module_of_pack("parallel_runtime.planner.tries").Tries(plans=(made.uly2, made.ring2), copies=2)
    now = [0.0]

    def try_plans(self: Any, *_: object) -> None:
        self.tries, now[0] = tries, 50.0

    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(module_of_pack("nodes.host.proof.trying").Trier, "try_plans", try_plans)
    told, found = tuned(SECONDS, NEAR, seconds=60)
    want = "60 s were not enough: 2 copies of a step took 50.0 s; nothing is kept, use "
    assert told["line"] == f"{want}{module.ENOUGH * 50 * 6 / 2:.0f} s or more" and found.store.load(found.key) is None
