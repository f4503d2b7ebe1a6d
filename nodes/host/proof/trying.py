"""Tries plans on copies of a run's first step, and keeps the quickest for the run and those after it.

Owns the copies, and what becomes of a plan that fails in one. Does not own which runs try plans (begin_tries.py), which
plans are tried nor which is kept (parallel_runtime/planner/tries.py), nor the file (kept_plans.py).
"""

import logging
import math
import time
import uuid
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ....parallel_runtime.errors import OutOfMemoryInRankError, PoolError, RaisedInRankError
from ....parallel_runtime.model_call import CallPlace, ModelCall
from ....parallel_runtime.plan import ParallelPlan
from ....parallel_runtime.planner.kept_plans import KeptPlans, TriesKey
from ....parallel_runtime.planner.tries import (
    GRAPH_COPIES,
    KeptPlan,
    Tries,
    changed_text,
    in_words,
    kept_of,
    proof_pays,
)
from ....parallel_runtime.proof import NOT_NEEDED, PROVEN
from ....parallel_runtime.redact_paths import redact_paths
from ..sampling.run_context import RunContext
from ..sampling.step_listener import StepListener

if TYPE_CHECKING:
    from .proving import Prover

log = logging.getLogger(__name__)
# Of a copy: nothing is recorded, and nothing is kept for a later step or found of an earlier one.
OF_A_COPY = {"timed": False, "trace": False, "step_cache": 0.0}
SAME = 1e-3  # of a result's norm: of what graphs replay, a kernel may have been chosen by how tensors lie
SETTLED = 0.02  # a run's seconds this near to what is known are no news


def store() -> KeptPlans:
    """The user's file."""
    return KeptPlans.of_user()


@dataclass(kw_only=True)
class Trier:
    """The tries of one run. `plans` to try, the run's own first; `rows` of a whole step; `kept` from earlier runs.

    `prover` is asked how many proofs it has computed: one is a first copy under the run's plan. `budget_s`: seconds
    after which no further copy begins, and what is half measured is dropped; None for all that are due. `limit` and
    `asynchronous` as `Tries` has them. `graphs`: the plans under which blocks may be quicker as CUDA graphs, which are
    tried where no run waits. `alone`: of what is due, the run's own plan is tried now, and what is kept is tried again.
    `tries` and `copied` are what became of them; `stored`: the next run finds what is kept.
    """

    key: TriesKey
    plans: tuple[ParallelPlan, ...]
    rows: int
    prover: "Prover"
    kept: KeptPlan | None = None
    budget_s: float | None = None
    graphs: frozenset[ParallelPlan] = frozenset()
    limit: float | None = None
    asynchronous: bool = True
    alone: bool = False
    tries: Tries | None = None
    stored: bool = True
    copied: str = ""

    def __post_init__(self) -> None:
        self._proofs = self.prover.num_computed

    @property
    def by_graphs(self) -> bool:
        """Whether a run that begins under what is kept has its blocks as CUDA graphs."""
        return self.kept is not None and self.kept.by_graphs and self.kept.plan in self.graphs

    def lost_weights(self, run: RunContext) -> bool:
        """Whether ComfyUI freed the run's weights since; the next copy would load them again without its knowledge.

        Not where a plan that failed ended the workers: then it is to load them again.
        """
        return not (self.tries is not None and self.tries.lost) and not run.model.holds(run.plan)

    def try_plans(self, run: RunContext, calls: Sequence[ModelCall], check_cancelled: Callable[[], None]) -> None:
        """Compute copies of a step's `calls` under each plan, and have the run go on under the quickest.

        Raises whatever `check_cancelled` raises; then nothing is kept. A plan whose ranks fail is kept out.
        """
        plans, self.plans = self.plans, ()
        if not plans or run.plan != plans[0]:  # which was given up meanwhile
            return
        if sum(call.rows for call in calls) != self.rows:  # of a part of a step: the other parts would go to others
            plans = tuple(plan for plan in plans if plan.batch_groups == run.plan.batch_groups)
        graphs = self.graphs.intersection(plans) if self.limit is None else frozenset()
        if len(plans) < 2 and not graphs:
            return
        began_s = time.perf_counter()
        until_s = None if self.budget_s is None else began_s + self.budget_s
        proven_now = self.prover.num_computed > self._proofs
        warm = frozenset(plans[:1] if proven_now else ())
        known = {} if self.kept is None else dict(self.kept.graphs_s)
        options = {"limit": self.limit, "asynchronous": self.asynchronous, "graphs_s": known}
        self.tries = tries = Tries(plans, warm=warm, idle=self.limit is None and until_s is None, **options)
        copies = _Copies(run, calls, check_cancelled, keeps=run.model.keeps_state)
        copies.compute(tries, until_s)
        copies.compute_by_graphs(tries, graphs, until_s)
        kept = self._proven(tries, run, calls, check_cancelled)
        if kept is None:
            return
        if self.alone or graphs.intersection(tries.seconds).difference(tries.graphs_s):  # for which there was no time
            kept = replace(kept, again=True)
        self.stored = store().save(self.key, kept)
        before, self.kept = self.kept, kept
        line = (before and changed_text(before, kept)) or kept.text
        stays = kept.plan != run.plan and not self._may_prove(tries, kept.plan, run, calls)
        line = f"{line} from the next run on" if stays else line
        self.copied = f"{tries.copies} copies of the first step in {time.perf_counter() - began_s:.1f} s"
        log.info("SP Config: %s (%s)", line, self.copied)
        reasons = (*run.decision.reasons, f"{line} ({self.copied})")
        goes_on = replace(run.decision, plan=run.plan if stays else kept.plan, reasons=reasons)
        run.keep(goes_on, line, by_graphs=kept.by_graphs and not stays)

    def _may_prove(self, tries: Tries, plan: ParallelPlan, run: RunContext, calls: Sequence[ModelCall]) -> bool:
        """Whether a quicker plan than the run's is proven, or may be before the run goes on."""
        times = 2 if run.model.keeps_state else 1
        return proof_pays(tries, plan, own=run.plan, steps=run.steps, times=times) or all(
            self.prover.knows(plan, call) for call in calls
        )

    def _proven(
        self, tries: Tries, run: RunContext, calls: Sequence[ModelCall], check_cancelled: Callable[[], None]
    ) -> KeptPlan | None:
        """What is kept: a plan other than the run's must be proven as well as that is, now or in the next run."""
        as_good = [proof.verdict in (PROVEN, NOT_NEEDED) for proof in run.proofs]
        while (kept := kept_of(tries, self.kept)) is not None and kept.plan != run.plan:
            if not self._may_prove(tries, kept.plan, run, calls):
                break
            other = replace(
                run,
                decision=replace(run.decision, plan=kept.plan),
                listener=StepListener(),
                proofs=[],
                remarks=[],
                trier=None,
            )
            try:
                for call in calls:
                    self.prover.check(other, call, check_cancelled, looks=False)
            except (PoolError, ValueError) as error:  # which the plan's own copy did not meet
                run.model.pool.retract_failure()
                log.warning("%s could not be proven and is kept out: %s", in_words(kept.plan), _why(error))
                tries.fail(kept.plan, _why(error))
                continue
            unproven = not all(proof.verdict in (PROVEN, NOT_NEEDED) for proof in other.proofs)
            if other.shares_by(kept.plan) and not (unproven and all(as_good)):
                break
            tries.fail(kept.plan, "not proven to compute the same")
        return kept

    def _replace_failed(self, kept: KeptPlan, run: RunContext) -> None:
        """The run began under the kept plan and gave it up, as its proof failed: later runs have the next best."""
        seconds = {plan: step_s for plan, step_s in kept.seconds.items() if plan != kept.plan}
        if seconds:
            best = min(seconds, key=kept.taken_s)
            failed = {**kept.failed, kept.plan: "not proven to compute the same"}
            left = replace(kept, plan=best, seconds=seconds, failed=failed, expected_s=kept.taken_s(best), again=False)
            store().save(self.key, left)

    def after(self, run: RunContext) -> None:
        """A run has ended: what its steps took under the kept plan counts from the next one on."""
        if self.kept is not None and not run.shares_by(self.kept.plan) and self.tries is None:
            self._replace_failed(self.kept, run)
        if self.kept is None or not run.shares_by(self.kept.plan) or run.step_cache or run.stock_cache:
            return
        if self.kept.by_graphs and run.graphs_under != run.plan:  # what is expected is of blocks as graphs
            return
        step_s = run.usual_step_s
        if step_s is None:
            return
        now = self.kept.after_run(step_s)
        slower = now.again and not self.kept.again
        if slower:
            log.info(
                "SP Config: %s: steps take %.2fx as long as in its try; plans are tried again",
                in_words(run.plan),
                step_s / self.kept.taken_s(run.plan),
            )
        if slower or now.expected_s < (1 - SETTLED) * self.kept.expected_s:
            store().save(self.key, now)


class _Copies:
    """Copies of a step's calls, computed under any plan. `keeps`: the model's class keeps something between calls."""

    def __init__(
        self, run: RunContext, calls: Sequence[ModelCall], check_cancelled: Callable[[], None], *, keeps: bool
    ) -> None:
        self._run, self._calls, self._check, self._keeps = run, calls, check_cancelled, keeps
        self._before: ParallelPlan | None = None
        self._outs: dict[ParallelPlan, list[torch.Tensor]] = {}

    def compute(self, tries: Tries, until_s: float | None = None) -> None:
        """All copies that are due, of which none begins after `until_s`, by `time.perf_counter`."""
        while (plan := tries.due) is not None:
            if until_s is not None and time.perf_counter() > until_s:
                tries.give_up()
                return
            self._check()
            self._run.listener.trying(f"trying {in_words(plan)} on a copy of the first step")
            began_s = time.perf_counter()
            try:
                if self._keeps and plan != self._before:  # a copy that keeps, before those that find it
                    self._name = uuid.uuid4().hex
                    self._copy(plan)
                self._before = plan
                seconds = self._copy(plan)
            except (PoolError, ValueError) as error:
                self._run.model.pool.retract_failure()
                self._before = None
                why = _why(error)
                log.warning("%s was tried and is kept out: %s", in_words(plan), why)
                if tries.limit is not None:  # workers that start again for the run are what the failure cost it
                    self._load()
                tries.fail(plan, why, took_s=time.perf_counter() - began_s)
            else:
                tries.note(plan, seconds, took_s=time.perf_counter() - began_s)

    def compute_by_graphs(self, tries: Tries, plans: Container[ParallelPlan], until_s: float | None = None) -> None:
        """Of those of `plans` that were counted, copies with a CUDA graph of each block; those of none begin after
        `until_s`. Where workers fail in one, graphs of no further plan are made."""
        counted = [plan for plan in tries.seconds if plan in plans]
        for number, plan in enumerate(counted):
            if until_s is not None and time.perf_counter() > until_s:
                return
            try:
                tries.graphs_s[plan] = self._by_graphs(tries, plan)
            except (PoolError, ValueError) as error:
                self._run.model.pool.retract_failure()
                log.warning("%s: graphs of blocks were tried and are not used: %s", in_words(plan), _why(error))
                tries.lost = True
                tries.graphs_s |= dict.fromkeys(counted[number:], math.inf)
                return

    def _by_graphs(self, tries: Tries, plan: ParallelPlan) -> float:
        """Seconds of the slower copy of two with a CUDA graph of each block, after those that make the graphs.

        Endless where a rank runs blocks without, or computes something else than without.
        """
        self._run.listener.trying(f"trying graphs of blocks under {in_words(plan)} on a copy of the first step")
        seconds, plain = list[float](), self._outs[plan]
        for _ in range(GRAPH_COPIES):
            self._check()
            seconds.append(self._copy(plan, graphs=True))
            tries.copies += 1
            if any(_differs(*each) for each in zip(self._outs[plan], plain, strict=True)):
                log.warning("%s: graphs of blocks are not used: they compute something else", in_words(plan))
                return math.inf
        return max(seconds[-2:]) if self._all_by_graphs else math.inf

    def _load(self) -> None:
        """Have the weights in the workers as the run needs them, which start again where a plan ended them."""
        run = self._run
        run.model.pool.load(run.model.spec, run.plan, deltas=run.deltas, check_cancelled=self._check)

    def _copy(self, plan: ParallelPlan, *, graphs: bool = False) -> float:
        """Seconds of one copy; what it computes is thrown away."""
        run = self._run
        place = CallPlace(f"try {self._name}", "") if self._keeps else None
        options = {**OF_A_COPY, "graphs": graphs}
        copies = [replace(call, place=place, options={**call.options, **options}) for call in self._calls]
        result = run.model.pool.run(run.model.spec, plan, copies, deltas=run.deltas, check_cancelled=self._check)
        self._outs[plan] = result.outs
        ran = [rank.compiled for rank in result.ran if rank.compiled is not None]
        self._all_by_graphs = graphs and bool(ran) and not any(each.uncompiled_blocks or each.reason for each in ran)
        return result.wall_s - result.compile_s


def _differs(out: torch.Tensor, plain: torch.Tensor) -> bool:
    """Whether a result is another than that of the same kernels without graphs."""
    return not (out.float() - plain.float()).norm() <= SAME * plain.float().norm()


def _why(error: Exception) -> str:
    """Why a plan is kept out, in a few words."""
    if isinstance(error, OutOfMemoryInRankError):
        return "out of memory"
    said = redact_paths(error.cause if isinstance(error, RaisedInRankError) else str(error))
    return f"failed ({said.splitlines()[0][:120]})" if said else "failed"
