"""Tries that a user asks for: plans on a made-up call of a kind of work, within a budget of seconds.

Owns the made-up call, which plans the budget is for, and what is said of them. How plans are tried and kept is
trying.py's: the next run of such work begins under what was found.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from safetensors.torch import load_file

from ....parallel_runtime.model_call import ModelCall
from ....parallel_runtime.plan import ParallelPlan
from ....parallel_runtime.planner.automatic import Decision, describe_work
from ....parallel_runtime.planner.choose import Prediction
from ....parallel_runtime.planner.comfyui_process import ComfyUIProcess
from ....parallel_runtime.planner.tries import Tries, changed_text, in_words, near, tried_in_s
from ....parallel_runtime.planner.work import Work
from ....parallel_runtime.weight_delta import PRISTINE
from ..sampling.run_context import RunContext
from ..sampling.step_listener import StepListener
from .begin_tries import UNKNOWN, Tunable, is_asynchronous, key_of, under_graphs
from .trying import Trier, store

SEED = 0
LIMITS = {
    "width": (16, 16384),
    "height": (16, 16384),
    "frames": (1, 4096),
    "text_tokens": (1, 8192),
    "batch": (1, 64),
    "seconds": (1, 3600),
}
ENOUGH = 1.5  # times what copies took so far: so much is said to be enough where a budget was not
UNSTORED = "no run has it, as plans.json cannot be written (set XDG_CACHE_HOME to a folder that can be)"


class TuningEndedError(Exception):
    """The user or a prompt ended the tuning; nothing is kept."""


@dataclass(frozen=True, kw_only=True)
class TuningRequest:
    """A kind of work to find the quickest plan for, and for how many seconds plans may be tried.

    `width` and `height` in pixels; `frames` of a video, None for as many as usual; `text_tokens` of the prompt;
    `guided`: a cfg scale above 1. Raises `ValueError` for a number that is out of range.
    """

    width: int = 1024
    height: int = 1024
    frames: int | None = None
    text_tokens: int = 512
    guided: bool = False
    batch: int = 1
    seconds: float = 60.0

    def __post_init__(self) -> None:
        for name, (low, high) in LIMITS.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ValueError(f"{name}={value} is outside {low} to {high}; use a number in that range")


class Said(StepListener):
    """Hands on what goes on."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.trying = say

    def fell_back(self, decision: Decision, why: str) -> None:
        """A plan that computes something else."""
        self.trying(why)


def tune(
    of: Tunable, asked: TuningRequest, *, say: Callable[[str], None], check: Callable[[], None] = lambda: None
) -> dict[str, object]:
    """Try the plans that are predicted to be near for `asked`, and keep the quickest for such runs.

    The weights are in the workers. `say` is told what begins, and `check` is called meanwhile: what it raises ends
    this, and nothing is kept. The answer has `line`, the sentence; `kept`, the plan that such runs have from now on, or
    None; and `plans`, what was predicted and found of each. Raises `ValueError` for a MODEL whose runs try nothing,
    and for one that no call can be made up for; `PoolError` where workers fail under the plan that would run.
    """
    if of.why_not:
        raise ValueError(of.why_not)
    say("making up a call of the model")
    call, work = made_up(of, asked)
    check()
    decision = of.choose_again(work)  # type: ignore[misc]  # `why_not` said that it is there
    decision = replace(decision, plan=decision.plan.with_shares(of.shares))
    if not decision.table:
        raise ValueError(UNKNOWN)
    table = of.table(decision)
    plans, options = near(table, decision.plan), {"asynchronous": is_asynchronous(of), "compiled": of.compiled}
    ends = tried_in_s(table, plans, **options)
    fit = tuple(plan for plan, end_s in zip(plans, ends, strict=True) if end_s <= asked.seconds)
    began_s, trier, graphs = time.perf_counter(), None, under_graphs(of, table)
    if len(plans) < 2 and not graphs.intersection(plans):
        line = f"nothing to try: no other exact plan is predicted to be near {in_words(decision.plan)}"
    elif len(fit) < min(2, len(plans)):
        names, end_s = " and ".join(map(in_words, plans[:2])), ends[: len(plans[:2])][-1]
        line = f"{asked.seconds:g} s is too little: to try {names} is predicted to take {end_s:.1f} s; nothing is kept"
    else:
        key = key_of(of, work, graphs=bool(graphs))
        before = store().load(key)
        kept = before if before is not None and before.plan in fit else None
        trier = Trier(key=key, plans=fit, rows=work.rows, prover=of.prover, kept=kept, graphs=graphs)
        trier.budget_s = asked.seconds
        line = _tried(of, trier, decision, call, asked, say, check)
        line = "; ".join(filter(None, (line, _left_out(plans[len(fit) :], ends[-1]))))
    return {
        "model": type(of.prover.transformer).__name__,
        "devices": [str(device) for device in of.pooled.devices],
        "work": describe_work(work).rpartition(", ")[0],
        "seconds": asked.seconds,
        "took_s": time.perf_counter() - began_s,
        "copies": 0 if trier is None or trier.tries is None else trier.tries.copies,
        "kept": trier.kept.plan.describe() if trier is not None and trier.kept is not None else None,
        "line": line,
        "plans": _rows(table, plans, None if trier is None else trier.tries),
    }


def made_up(of: Tunable, asked: TuningRequest) -> tuple[ModelCall, Work]:
    """A call of all rows of such a step, with random numbers, and its work. Takes seconds, in a process of its own.

    Raises `ValueError` for a model that no random call can be made of.
    """
    usual, model, spec = of.decision.work, of.decision.model, of.pooled.spec
    if usual is None or model is None or spec.comfyui is None:
        raise ValueError(of.why_not)
    rows = asked.batch * (2 if asked.guided else 1)
    size = {"width": asked.width, "height": asked.height, "frames": asked.frames, "text_tokens": asked.text_tokens}
    with ComfyUIProcess(spec.comfyui, "cpu", counting=True) as process:
        file = str(process.folder / "call.safetensors")
        size |= {"batch": rows, "seed": SEED}
        said = process.ask("made", path=spec.path, dtype=spec.dtype, size=size, file=file)
        found = load_file(file)
    tensors = {f"t{number}": found[f"t{number}"] for number in range(len(found))}
    call = ModelCall(tensors=tensors, out_shape=tuple(said["out_shape"]), options=said["options"])
    work = replace(
        usual,
        image_tokens=model.image_tokens(said["numbers"]),
        text_tokens=asked.text_tokens,
        guided=asked.guided,
        batch=asked.batch,
        graphs=usual.graphs and of.deltas == PRISTINE,
    )
    return call, work


def _tried(
    of: Tunable,
    trier: Trier,
    decision: Decision,
    call: ModelCall,
    asked: TuningRequest,
    say: Callable[[str], None],
    check: Callable[[], None],
) -> str:
    """Have the plans tried; the sentence. `trier` has what is kept of them, None where nothing is."""
    before, trier.kept = trier.kept, None
    run = RunContext(
        model=of.pooled,
        decision=decision,
        deltas=of.deltas,
        compiled=of.compiled,
        attention=of.attention,
        exchange=of.exchange,
        step_cache=of.step_cache,
        listener=Said(say),
        prover=of.prover,
        images=asked.batch,
        guided=asked.guided,
    )
    calls = [replace(call, options={**call.options, **run.engine_options()})]
    run.check(calls[0], check)
    if not run.shares_by(decision.plan):
        return run.remarks[-1]
    began_s = time.perf_counter()
    trier.kept = before

    def still() -> None:
        check()
        if trier.lost_weights(run):
            raise TuningEndedError("ended, as ComfyUI freed the model's weights; nothing is kept")

    trier.try_plans(run, calls, still)
    took_s, tries, kept = time.perf_counter() - began_s, trier.tries, trier.kept
    if tries is None or kept is None or not tries.seconds:
        trier.kept = None
        copies = 0 if tries is None else tries.copies
        if tries is not None and tries.failed and not tries.given_up:
            return "; ".join(f"{in_words(plan)}: {why}" for plan, why in tries.failed.items())
        return (
            f"{asked.seconds:g} s were not enough: {copies} copies of a step took {took_s:.1f} s; nothing is kept, use "
            f"{ENOUGH * took_s * _due(tries) / max(1, copies):.0f} s or more"
        )
    line = (before and changed_text(before, kept)) or kept.text
    if trier.stored:
        return line
    trier.kept = None
    return f"{line}; {UNSTORED}"


def _due(tries: Tries | None) -> int:
    """Copies that all plans take at most."""
    return 3 * len(tries.plans) if tries is not None else 0


def _left_out(plans: Sequence[ParallelPlan], all_s: float) -> str:
    """What the budget was too small for."""
    if not plans:
        return ""
    return f"not tried for lack of time: {', '.join(map(in_words, plans))} (all are predicted to take {all_s:.0f} s)"


def _rows(
    table: Sequence[Prediction], plans: Sequence[ParallelPlan], tries: Tries | None
) -> list[Mapping[str, object]]:
    predicted = {row.plan: row.plain.step_s for row in table}
    seconds, failed, graphs_s = ({}, {}, {}) if tries is None else (tries.seconds, tries.failed, tries.graphs_s)
    return [
        {
            "plan": plan.describe(),
            "name": in_words(plan),
            "predicted_s": predicted[plan],
            "step_s": seconds.get(plan),
            "graphs_s": None if graphs_s.get(plan) == math.inf else graphs_s.get(plan),
            "failed": failed.get(plan, ""),
        }
        for plan in plans
    ]
