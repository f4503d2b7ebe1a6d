"""One sampling run: what its steps need, frozen when ComfyUI's `outer_sample` begins, and how a step gets to the pool.

The context lies in the run's own copy of ComfyUI's `transformer_options`, under `RUN_KEY`, and is taken out before a
request is made; so runs that share a MODEL, or take turns, each have their own. Does not own when a run begins
(new_model.py), what the pool holds (pooled_model.py), nor ComfyUI's model classes.
"""

import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from ....parallel_runtime.devices import Device
from ....parallel_runtime.exchange_formats import EXACT
from ....parallel_runtime.model_call import CallPlace, ModelCall
from ....parallel_runtime.models.hosted.calls import RUN_KEY
from ....parallel_runtime.plan import ParallelPlan
from ....parallel_runtime.planner.automatic import Decision
from ....parallel_runtime.pool.calls import StepDone, WorkerLoopResult, WorkerLoopRun
from ....parallel_runtime.proof import Proof
from ....parallel_runtime.redact_paths import redact_paths
from ....parallel_runtime.weight_delta import PRISTINE, WeightDeltas
from ....parallel_runtime.wire.replies import SampleReply, StepReply
from ..model.pooled_model import PooledModel
from ..tasks.cooperative_tasks import Handed, hand_over
from .step_listener import StepListener

if TYPE_CHECKING:  # they ask ComfyUI for the graph and for its classes, which a run does not
    from ..contract.writers import Written
    from ..proof.proving import Prover
    from ..proof.trying import Trier
    from .late_previews import LateCallback

CHECKED_CALLS = 16  # a step makes one or two; each of them with and without what stays for some steps only
# ComfyUI asks how much memory a run takes with no word of which: it is the one that this code is in.
_INSIDE: ContextVar["RunContext | None"] = ContextVar("parallel_dit_inside_run", default=None)
_BEGUN: list["RunContext"] = []  # of every thread, not yet ended


@dataclass(frozen=True, kw_only=True)
class MeasuredRequest:
    """One request to the pool, as it was measured: seconds, since when, and the workers' own reports, by rank.

    `num_calls`: of the model that it carried; `traces` are the ranks' traces, where they were asked for.
    """

    num_calls: int
    began_s: float
    wall_s: float
    ranks: Sequence[StepReply | SampleReply]
    traces: Mapping[int, bytes]


@dataclass(frozen=True, kw_only=True)
class Recorder:
    """What a caller wants to know of a run: its requests in order, and seconds by rank that loaded weights for it.

    With `trace`, each rank traces each request.
    """

    trace: bool = False
    requests: list[MeasuredRequest] = field(default_factory=list)
    rank_load_s: dict[int, float] = field(default_factory=dict)


@dataclass(kw_only=True, eq=False)
class RunContext:
    """One sampling run with a parallel MODEL; no two are equal, and a deep copy of the options has the same one.

    What it is of stays; what the run finds is noted in it. `decision` changes before the first step alone: `trier` may
    find a quicker plan (`keep`), and an automatic plan whose proof fails gives way to one for the run's `images`, and
    for both sides at once where it is `guided` (`fall_back`); `whole`: each rank computes all tokens then. Under
    `graphs_under` alone blocks run as CUDA graphs. `remarks` are what the user is told of that. `step_seconds` are what
    requests of one step took. `loop` says where the sampler's loop ran once it has: in ComfyUI ("host"), or as the
    worker loop ("resident"); `loop_reason`, why it stayed in ComfyUI where the workers were to have it. `step` of
    `steps` is under way, where that is recorded.

    `captured` collects the run's calls instead of sending them; each is answered with zeros. `prover` is that of a
    model that ComfyUI's own module computes, `proofs` what it found for the calls of this run, `checked` the forms and
    shapes of the last calls that it was asked about. `wrapped`: a node's function is around the model's calls, and may
    make several of one, as of tiles: none can be told from the others. `packs_around`: code of a pack is, and may
    change modules for the time of a call. `stock_cache`: with EasyCache or LazyCache. `controlled`: with a ControlNet,
    which computes in this process; `lean`: that, or another MODEL, does so within a step, so ranks leave memory for it.
    `written`: what nodes wrote into the MODEL, with the node that did. `late`: the callback of the step before, which
    is called once the next request is under way.
    """

    model: PooledModel
    decision: Decision
    deltas: WeightDeltas = PRISTINE
    compiled: bool = False
    graphs_under: ParallelPlan | None = None
    whole: bool = False
    step_cache: float = 0.0
    attention: str = ""
    exchange: str = EXACT
    listener: StepListener = field(default_factory=StepListener)
    recorder: Recorder | None = None
    captured: list[ModelCall] | None = None
    prover: "Prover | None" = None
    trier: "Trier | None" = None
    step_seconds: list[float] = field(default_factory=list)
    proofs: list[Proof] = field(default_factory=list)
    checked: deque[object] = field(default_factory=lambda: deque(maxlen=CHECKED_CALLS))
    wrapped: bool = False
    packs_around: bool = False
    images: int = 1
    guided: bool = False
    remarks: list[str] = field(default_factory=list)
    stock_cache: bool = False
    controlled: bool = False
    lean: bool = False
    written: "Written | None" = None
    late: "LateCallback | None" = None
    steps: int = 1
    step: int = 0
    loop: str = "host"
    loop_reason: str | None = None
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __deepcopy__(self, memo: dict[int, object]) -> "RunContext":
        return self

    @property
    def plan(self) -> ParallelPlan:
        """The plan that runs."""
        return self.decision.plan

    def shares_by(self, plan: ParallelPlan) -> bool:
        """Whether the run goes by this plan and has not given it up."""
        return self.plan == plan and not self.whole

    def call(self, call: ModelCall, *, check_cancelled: Callable[[], None], place: str | None = None) -> torch.Tensor:
        """One call of the transformer; in a task, others go first.

        `place` tells the call from the others of its step. Returns the result on the CPU. Raises `PoolError` when a
        worker fails, `ValueError` for shapes that the model cannot take and for a plan that was found to compute
        something else, and whatever `check_cancelled` raises.
        """
        call = replace(call, place=self._place(place), options={**call.options, **self.engine_options()})
        if self.captured is not None:
            self.captured.append(call)
            return torch.zeros(call.out_shape)
        self.check(call, check_cancelled)
        before = self.proven_for

        def send(calls: list[ModelCall]) -> list[torch.Tensor]:
            if self.proven_for != before:  # the call of another task had another plan taken
                for each in calls:
                    self.check(each, check_cancelled)
            return self._send(calls, check_cancelled)

        (out,) = hand_over([Handed(self._together(), send, call)])
        return out

    def check(self, call: ModelCall, check_cancelled: Callable[[], None]) -> None:
        """Have it known that the plan computes such a call of ComfyUI's own module as one device does.

        Raises `ValueError` for a plan that was found to compute something else, and as `call`.
        """
        if self.prover is None:
            return
        kind = (self.proven_for, call.options["call"], [tensor.shape for tensor in call.tensors.values()])
        if kind not in self.checked:
            self.prover.check(self, call, check_cancelled)
            self.checked.append(kind)

    def try_plans(self, calls: Sequence[ModelCall], check_cancelled: Callable[[], None]) -> None:
        """Have plans tried on copies of the first step, whose calls these are; nothing after that. Raises as `call`."""
        trier, self.trier = self.trier, None
        if trier is None:
            return
        before = self.plan
        trier.try_plans(self, calls, check_cancelled)
        if self.plan != before:
            self.checked.clear()
            for call in calls:
                self.check(call, check_cancelled)

    def keep(self, decision: Decision, line: str, *, by_graphs: bool = False) -> None:
        """Go on under the plan that tries found, its blocks as graphs or not; `line` is what the user is told."""
        self.decision = decision
        self.graphs_under = decision.plan if by_graphs else None
        self.listener.tried(decision, line)

    @property
    def proven_for(self) -> tuple[ParallelPlan, bool, str]:
        """What calls are proven for: the plan, whether it shares tokens, and the one that was found for the class."""
        return self.plan, self.whole, self.model.spec.found

    @property
    def usual_step_s(self) -> float | None:
        """Seconds of a step of the run, without the first; None where it had other requests than one a step."""
        seconds = self.step_seconds
        return median(seconds[1:]) if len(seconds) == self.steps > 1 else None

    def _place(self, place: str | None) -> CallPlace | None:
        """By what ranks find what the call before this one left there; None where calls leave none or look alike.

        A class that keeps something itself tells calls apart by what they are given: it needs to know the run alone.
        """
        if self.model.keeps_state:
            return CallPlace(self.run_id, place or "")
        if (self.plan.pipefusion == 1 and not self.step_cache) or place is None or self.wrapped:
            return None
        return CallPlace(self.run_id, place)

    def note(self, proof: Proof) -> None:
        """Keep what is known of the plan for a kind of call, once."""
        if proof not in self.proofs:
            self.proofs.append(proof)
            self.listener.proved(proof)

    def stays(self, reason: str) -> None:
        """The sampler's loop stays in ComfyUI, for that reason."""
        self.loop_reason = reason
        self.listener.loop_stays(reason)

    def call_late(self) -> None:
        """Have the step before told now, where that was put off. Raises what its callback raises."""
        if self.late is not None:
            self.late.call_due()

    def fall_back(self, decision: Decision, why: str) -> None:
        """Go on under another plan, with nothing tried any more, and with no tokens shared; `why` is what the user is
        told."""
        self.decision, self.trier, self.whole = decision, None, decision.plan.parts > 1
        if why not in self.remarks:
            self.remarks.append(why)
            self.listener.fell_back(decision, why)

    def _note_uncompiled(self, ranks: Sequence[StepReply] | Sequence[SampleReply]) -> None:
        """Have the user told, once, why ranks ran blocks without graphs that were to have some."""
        compiled = [rank.ran.compiled for rank in ranks if rank.ran is not None]
        for reason in dict.fromkeys(each.reason for each in compiled if each is not None and each.reason):
            why = f"blocks run uncompiled: {redact_paths(reason)}"  # the compiler's words, on the node
            if why not in self.remarks:
                self.remarks.append(why)
                self.listener.uncompiled(why)

    def _note_drained(self, reason: str | None) -> None:
        """Have the user told why a pipeline was empty between the steps of a loop in the workers."""
        if reason is not None:
            self.loop_reason = f"the pipeline is empty between steps: {reason}"
            self.listener.drained(self.loop_reason)

    def sample(self, run: WorkerLoopRun, *, on_step: StepDone, check_cancelled: Callable[[], None]) -> WorkerLoopResult:
        """The whole run in the workers; its latent (B, S, C) fp32 lies on the CPU. Raises as `call`."""

        def told(step: int, denoised: torch.Tensor) -> None:
            self.listener.worker_loop_step(self.plan.ranks)
            on_step(step, denoised)

        began_s = time.perf_counter()
        run = replace(run, conds=tuple(map(self._as_found, run.conds)))
        self.listener.worker_loop_began()
        result = self.model.pool.sample(
            self.model.spec,
            self.plan,
            run,
            deltas=self.deltas,
            on_step=told,
            check_cancelled=self._checks(check_cancelled),
        )
        self._note_uncompiled(result.ranks)
        self._note_drained(result.drained)
        self.step_seconds += map(max, zip(*(ran.step_s for ran in result.ran), strict=False))
        num_calls = len(run.conds) * run.recurrence.num_calls
        self._record(num_calls=num_calls, began_s=began_s, wall_s=result.wall_s, ranks=result.ranks, traces={})
        return result

    def engine_options(self) -> dict[str, object]:
        """What every call asks of the engine."""
        recorder = self.recorder
        return {
            "timed": recorder is not None,
            **({} if recorder is None else {"step": (self.step, self.steps)}),
            "trace": recorder is not None and recorder.trace,
            "compiled": self.compiled,
            **({"step_cache": self.step_cache} if self.step_cache else {}),
            **({"attention": self.attention} if self.attention else {}),
            **({"lean": True} if self.lean else {}),
            **({} if self.exchange == EXACT else {"exchange": self.exchange}),
        }

    def _as_found(self, call: ModelCall) -> ModelCall:
        """The call with its blocks as CUDA graphs, on all ranks, where they were quicker under this plan; with all
        tokens on each rank where the plan may share none."""
        if self.whole:
            return replace(call, options={**call.options, "whole": True})
        if self.graphs_under != self.plan:
            return call
        return replace(call, options={**call.options, "graphs": True})

    def _together(self) -> tuple:
        """What runs have in common whose calls may travel in one request."""
        model, deltas = self.model, self.deltas
        return (
            model.devices,
            model.spec,
            self.plan,
            deltas.name,
            deltas.side_branch,
            self.compiled,
            self.graphs_under,
            self.whole,
            self.step_cache,
            self.attention,
            self.exchange,
        )

    def _send(self, calls: list[ModelCall], check_cancelled: Callable[[], None]) -> list[torch.Tensor]:
        steps = all(call.options.get("method") is None for call in calls)  # else what the class asks before a run
        if steps:
            self.try_plans(calls, check_cancelled)
        asked = list(map(self._as_found, calls))
        result = self.model.pool.run(
            self.model.spec,
            self.plan,
            asked,
            deltas=self.deltas,
            on_sent=self.call_late,
            check_cancelled=self._checks(check_cancelled),
        )
        self._note_uncompiled(result.ranks)
        if steps:
            self.step_seconds.append(result.wall_s)
        self.listener.request(result.wall_s, result.ranks)
        began_s = time.perf_counter() - result.wall_s
        self._record(
            num_calls=len(calls), began_s=began_s, wall_s=result.wall_s, ranks=result.ranks, traces=result.traces
        )
        return result.outs

    def _record(self, **measured: Any) -> None:  # noqa: ANN401  the fields of MeasuredRequest
        if self.recorder is not None:
            self.recorder.requests.append(MeasuredRequest(**measured))

    def _checks(self, check_cancelled: Callable[[], None]) -> Callable[[], None]:
        """What the pool calls while it waits: whether to go on and, where blocks are compiled, whether they are now."""
        if not self.compiled:
            return check_cancelled

        def check() -> None:
            check_cancelled()
            if self.model.pool.state == "compiling":
                self.listener.compiling()

        return check


def place_of(transformer_options: Mapping[str, Any]) -> str | None:
    """What tells a call from the others of its step: the conditionings in it, which have new names in every run, and
    what steers blocks, as a second call without a kind of attention that guides the first.

    None where that does not tell: all windows of a long video have the same conditionings, and so has a call that skips
    blocks.
    """
    untold = transformer_options.get("context_window") is not None or transformer_options.get("patches_replace")
    names = None if untold else transformer_options.get("uuids")
    if not names:
        return None
    steers = [f"{name}={words}" for name, value in transformer_options.items() if (words := _steering(value))]
    return " ".join((*map(str, names), *sorted(steers)))


def _steering(value: object) -> str:
    """The words of a value that chooses what is computed: yes or no, or which blocks. "" for any other."""
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, list | tuple | set | frozenset) and all(type(each) is int for each in value):
        return ",".join(map(str, sorted(value) if isinstance(value, set | frozenset) else value))
    return ""


def run_of(model_options: Mapping[str, Any]) -> RunContext | None:
    """The run that these options of ComfyUI's belong to; None outside of one, and for one with a stock MODEL."""
    return model_options.get("transformer_options", {}).get(RUN_KEY)


def options_of_run(model_options: Mapping[str, Any], run: RunContext) -> dict[str, Any]:
    """The options with another run's context; they themselves stay as they are."""
    return {**model_options, "transformer_options": {**model_options.get("transformer_options", {}), RUN_KEY: run}}


def run_inside(model: PooledModel) -> RunContext | None:
    """The run of this model that this code is in, wherever its options are; None outside of one."""
    run = _INSIDE.get()
    return None if run is None or run.model is not model else run


def is_sampled_on(devices: Sequence[Device]) -> bool:
    """Whether a run on these devices has begun and not ended, in any thread."""
    return any(run.model.devices == devices for run in [*_BEGUN])


@contextmanager
def begun(model_options: dict[str, Any], run: RunContext) -> Iterator[None]:
    """Have the run's context in its options for the time of the block; then that of the run around it again, if any."""
    options = model_options.setdefault("transformer_options", {})
    around = options.get(RUN_KEY)
    options[RUN_KEY] = run
    token = _INSIDE.set(run)
    _BEGUN.append(run)
    try:
        yield
    finally:
        _BEGUN[:] = [each for each in _BEGUN if each is not run]
        run.late = None  # it holds the previewer
        _INSIDE.reset(token)
        options[RUN_KEY] = around
        if around is None:
            del options[RUN_KEY]
