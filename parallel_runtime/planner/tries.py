"""Plans that are tried before a sampling run, and which of them is kept. Predictions choose what to try; what is
measured chooses what to keep.

Owns the rules: which plans are worth a try, how many steps each gets, which one is kept, and when what was measured is
measured again. Pure: seconds are given, nothing is run (nodes/host/proof/trying.py does that) or written
(kept_plans.py does).

A try is a copy of the run's first step, of which nothing is used but the seconds. The first copy under a plan makes its
process groups and is not counted. Two are, but for a plan that the first counted one shows to be far behind. The plan
that is predicted best stays unless each copy of another was quicker: other work on the machine slows single copies.

A run that waits for its tries may take `LIMIT` steps longer and no more, and what plans took that failed counts. Then a
copy of the plan predicted best comes first, and one of another, which counts at once where the host waits for the
device, as on a CPU (groups are made before its clock starts), and elsewhere where it was quicker all the same, or where
no time is left for another. Only where it was quicker by `NEAR` is the first measured once more. A smaller gain in so
few copies may be the machine's: the plan stays. What there was no time for (`left`) is tried while ComfyUI is idle:
other plans, too, for `IDLE_S`, and those that are near each other in up to `IDLE_COUNTED` copies in turns, where that
takes `IDLE_S` at most. Then their medians decide. The runs' own steps are measured, too (`KeptPlan.after_run`).

Where the device is predicted to wait for its host, a plan is tried by a CUDA graph of each block, too, while no user
waits: what it takes by them counts where that is quicker by `GRAPHS_GAIN`. Where prompts follow each other, so that
nothing is tried between them, a run waits for that of its own plan if it is predicted to end sooner all the same.
"""

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate

from ..plan import AXES, WEIGHTS, ParallelPlan
from .choose import GRAPHS_GAIN, Prediction, graphs_gain_s

# Of a run that waits for its tries: a shorter one would spend too much of itself on them; one of shorter steps is over
# in two seconds, and single copies tell little of it.
MIN_STEPS, MIN_STEP_S = 16, 0.1
MOST_PLANS = 3
COUNTED = 2
IDLE_COUNTED = 15  # copies of a plan while no user waits, where the steps are so short that one slow copy counts
IDLE_S = 10.0  # for which more plans are tried then, and for which those that are near are counted more often
LIMIT = 3.0  # steps that a run may take longer for its tries
NEAR = 1.05  # times faster, by so few copies: below it the plan predicted best stays
NOT_COUNTED = 1
# How far a predicted ratio of two plans is taken to be off: the median error of one prediction is 8.5 %, and its 90th
# percentile 25 % (benchmarks/planner.md).
UNCERTAIN = 1.25
IDLE_UNCERTAIN = 2.0  # the same where no user waits, of steps so short that links and hosts decide
RUNS = 4  # for which what a try finds is taken to be of use: the present one and the next ones
CHANGE = 1.1  # times faster: below it a kept plan stays
FAR_BEHIND = 1.1  # times slower than the quickest so far, in its first counted step
FAR_BEHIND_ONCE = 1.5  # the same of the plan that is predicted best
GRAPH_COPIES = 4  # two by which graphs are made, and two that count
HOPELESS = 3.0  # times slower, in its first copy, beyond what groups take: no other copy is spent on it
GROUPS_S = 1.0  # to make a plan's process groups and connect them, on devices that run ahead of the host
COMPILE_S = 60.0  # to make graphs of a plan's blocks


def in_words(plan: ParallelPlan) -> str:
    """The plan for people: `ulysses 2`, `cfg 2 x ulysses 2`, `one device`, `ulysses 2 sharded`."""
    degrees = [f"{axis} {getattr(plan, axis)}" for axis in AXES if getattr(plan, axis) > 1]
    weights = "" if plan.weights == WEIGHTS[0] else f" {plan.weights}"
    return (" x ".join(degrees) or "one device") + weights


def worth_trying(
    table: Iterable[Prediction],
    taken: ParallelPlan,
    *,
    steps: int,
    asynchronous: bool,
    compiled: bool = False,
    idle: bool = False,
) -> tuple[ParallelPlan, ...]:
    """The plans to try for a run of so many steps, `taken` first, which is the one predicted best; () for no tries.

    Of the others those whose gain over this run and the next ones may be more than what their try takes, the most
    promising first, if that pays for the try of `taken` too. `table` has all that the weights serve as they lie.
    `idle`: they are tried after the run, however short that is, and for as long as `IDLE_S` others that are predicted
    to take up to `IDLE_UNCERTAIN` times as long.
    """
    rows = _exact(table)
    if taken not in rows:
        return ()
    first_s, set_up_s = rows[taken].cost.step_s, _set_up_s(asynchronous=asynchronous, compiled=compiled)
    if not idle and (steps < MIN_STEPS or first_s < MIN_STEP_S):
        return ()

    def tried_s(row: Prediction) -> float:
        return _copies_s(row) + set_up_s

    def may_gain_s(row: Prediction) -> float:
        return RUNS * steps * (first_s - row.cost.step_s / UNCERTAIN) - tried_s(row)

    others = sorted((row for row in rows.values() if row.plan != taken), key=lambda row: (-may_gain_s(row), row.run_s))
    worth = [row for row in others if may_gain_s(row) > 0][: MOST_PLANS - 1]
    if sum(map(may_gain_s, worth)) <= tried_s(rows[taken]) - set_up_s:
        worth = []
    if idle:
        left = [row for row in others if row not in worth and row.cost.step_s <= IDLE_UNCERTAIN * first_s]
        worth += [row for row, end_s in zip(left, accumulate(map(tried_s, left)), strict=True) if end_s <= IDLE_S]
        plainest = min(rows.values(), key=lambda row: row.plain.step_s)
        if plainest.plan != taken and plainest not in worth and any(row.without_graphs for row in rows.values()):
            worth.append(plainest)  # which is to be had where graphs turn out to be of no use
    return (taken, *(row.plan for row in worth)) if worth else ()


def graphs_pay_at_once(row: Prediction, *, steps: int) -> bool:
    """Whether a run that waits for a try of its plan's blocks as CUDA graphs is predicted to end sooner for it."""
    return graphs_gain_s(row.plain.step_s, row.cost.step_s, steps=steps) > _copies_s(row)


def graphs_pay(plain_s: float, graphs_s: float, *, steps: int) -> bool:
    """Whether a run of so many steps ends sooner for making graphs, by what steps took with and without."""
    return graphs_gain_s(plain_s, graphs_s, steps=steps) > 0


def near(table: Iterable[Prediction], taken: ParallelPlan) -> tuple[ParallelPlan, ...]:
    """All exact plans that fit and may be as quick as `taken`, which comes first, by their predictions; () where it is
    not among them. What they take is not weighed: the user asked for them (`tune`)."""
    rows = _exact(table)
    if taken not in rows:
        return ()
    limit_s = UNCERTAIN * rows[taken].cost.step_s
    others = sorted((row for row in rows.values() if row.plan != taken), key=lambda row: row.cost.step_s)
    return (taken, *(row.plan for row in others if row.cost.step_s < limit_s))


def tried_in_s(
    table: Iterable[Prediction], plans: Iterable[ParallelPlan], *, asynchronous: bool, compiled: bool = False
) -> list[float]:
    """Seconds in which each of these plans is predicted to have been tried, those before it included."""
    rows, set_up_s = _exact(table), _set_up_s(asynchronous=asynchronous, compiled=compiled)
    return list(accumulate(_copies_s(rows[plan]) + set_up_s for plan in plans))


def _exact(table: Iterable[Prediction]) -> dict[ParallelPlan, Prediction]:
    return {row.plan: row for row in table if row.fits and row.plan.pipefusion == 1}


def _copies_s(row: Prediction) -> float:
    """Seconds of all copies of a plan's try, those by graphs included."""
    by_graphs = 0.0 if row.without_graphs is None else GRAPH_COPIES * row.cost.step_s
    return (NOT_COUNTED + COUNTED) * row.plain.step_s + by_graphs


def _set_up_s(*, asynchronous: bool, compiled: bool) -> float:
    return (GROUPS_S if asynchronous else 0.0) + (COMPILE_S if compiled else 0.0)


@dataclass
class Tries:
    """The tries of one run, under way: `due` says which plan is to compute the next copy, `note` takes its seconds.

    `plans`: the one that runs without tries first. `warm`: those whose first copy was computed already, as a proof.
    `limit`: of how many of its steps a run waits for them, None for as many as they take; `asynchronous`: devices run
    ahead of the host. `idle`: no user waits. `spent_s`: what all of it took by the clock, plans that failed included.
    `graphs_s`: what a step took with a CUDA graph of each block, at most, endless where these were of no use; from
    earlier tries where copies have not said yet. `lost`: workers ended in a copy.
    """

    plans: tuple[ParallelPlan, ...]
    warm: frozenset[ParallelPlan] = frozenset()
    limit: float | None = None
    asynchronous: bool = True
    idle: bool = False
    copies: int = 0
    spent_s: float = 0.0
    given_up: bool = False
    failed: dict[ParallelPlan, str] = field(default_factory=dict)
    graphs_s: dict[ParallelPlan, float] = field(default_factory=dict)
    lost: bool = False
    _counted: dict[ParallelPlan, list[float]] = field(default_factory=dict)
    _started: set[ParallelPlan] = field(default_factory=set)
    _first_s: dict[ParallelPlan, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._started |= self.warm

    @property
    def due(self) -> ParallelPlan | None:
        """The plan of the next copy; None when all is known."""
        if self.given_up:
            return None
        plans = [plan for plan in self.plans if plan not in self.failed]
        if self.limit is not None and plans and plans[0] in self._counted:
            return self._due_within(plans[0], plans[1:])
        for plan in plans:
            if plan not in self._counted:
                return plan
        return min(self._half_counted(), key=lambda plan: len(self._counted[plan]), default=None)

    @property
    def left(self) -> bool:
        """Whether more copies would be due if no user waited."""
        return replace(self, limit=None, idle=True).due is not None

    def _due_within(self, first: ParallelPlan, others: list[ParallelPlan]) -> ParallelPlan | None:
        """As `due`, once the `first` of the plans that work was counted."""
        step_s, left_s = min(self._counted[first]), self._left_s(first)
        for plan in others:
            copies = 1 if plan in self._started or not self.asynchronous else NOT_COUNTED + 1
            # without the first of them what was spent would be for nothing; with one that failed it is known
            alone = plan in self._started or (plan == others[0] and not self.failed)
            if plan not in self._counted and (alone or copies * step_s <= left_s):
                return plan
        quicker = any(NEAR * min(self._counted[plan]) < step_s for plan in others if plan in self._counted)
        return first if quicker and len(self._counted[first]) < COUNTED and step_s <= left_s else None

    def _left_s(self, first: ParallelPlan) -> float:
        """Seconds that the run may still wait. To connect groups is no step: `GROUPS_S` of each first copy are none."""
        step_s, connecting_s = min(self._counted[first]), 0.0
        if self.asynchronous:
            connecting_s = sum(min(GROUPS_S, max(0.0, took_s - step_s)) for took_s in self._first_s.values())
        return (self.limit or 0.0) * step_s - (self.spent_s - connecting_s)

    def _half_counted(self) -> list[ParallelPlan]:
        """Plans that are near the quickest and were not counted as often as that asks."""
        took_s = self.seconds if self.idle else {plan: found[0] for plan, found in self._counted.items()}
        best_s = min(took_s.values(), default=0.0)

        def is_near(plan: ParallelPlan) -> bool:
            # One slow copy is no reason against the plan that is predicted best, nor, where no user waits, against any.
            once = plan == self.plans[0] or (self.idle and len(self._counted[plan]) == 1)
            return took_s[plan] <= (FAR_BEHIND_ONCE if once else FAR_BEHIND) * best_s

        close = [plan for plan in took_s if is_near(plan)]
        counted = COUNTED
        if self.idle and close:
            counted = max(COUNTED, min(IDLE_COUNTED, int(IDLE_S / sum(took_s[plan] for plan in close))))
        return [plan for plan in close if len(self._counted[plan]) < counted] if len(close) > 1 else []

    def note(self, plan: ParallelPlan, seconds: float, *, took_s: float | None = None) -> None:
        """A copy under `plan` took so long, and `took_s` with all that came before and after it."""
        took_s = seconds if took_s is None else took_s
        self.copies += 1
        self.spent_s += took_s
        first, best_s = plan not in self._started, min(self.seconds.values(), default=math.inf)
        if first:
            self._first_s[plan] = took_s
        self._started.add(plan)
        if not first or self._counts_at_once(plan, seconds, best_s) or seconds > HOPELESS * best_s + GROUPS_S:
            self._counted.setdefault(plan, []).append(seconds)

    def _counts_at_once(self, plan: ParallelPlan, seconds: float, best_s: float) -> bool:
        """Whether the first copy of a plan counts: it was quicker all the same, or there is no time for another."""
        if self.limit is None or not self.asynchronous or plan == self.plans[0]:
            return self.limit is not None and not self.asynchronous
        base = next((each for each in self.plans if each in self._counted), None)
        if base is None or seconds < best_s:
            return base is not None
        again_s = min(seconds, max(best_s, seconds - GROUPS_S))
        return again_s > self._left_s(base)

    def fail(self, plan: ParallelPlan, why: str, *, took_s: float = 0.0) -> None:
        """The plan cannot be kept; that took so long, workers that start again for it included."""
        self.failed[plan] = why
        self.lost = True
        self.spent_s += took_s
        self._counted.pop(plan, None)

    def give_up(self) -> None:
        """No time is left: what is half measured counts for nothing, and nothing does where it may be the quickest."""
        if self.due is None:
            return
        half, seconds = self._half_counted(), self.seconds
        if len(seconds) - len(half) < 2 or min(seconds, key=lambda plan: seconds[plan]) in half:
            half = list(seconds)
        for plan in half:
            del self._counted[plan]
        self.given_up = True

    @property
    def seconds(self) -> dict[ParallelPlan, float]:
        """What a step took under each plan that was counted and has not failed: the less of two copies, as others run
        beside it, and the median of more."""
        return {plan: statistics.median_low(found) for plan, found in self._counted.items()}

    def best(self, before: ParallelPlan | None = None) -> ParallelPlan | None:
        """The quickest; the one that was kept `before` unless another is `CHANGE` times as fast. None: all failed.

        Without one, that of the run without tries, unless each of two copies of another was quicker than each of its,
        or its median by more copies. What a plan takes by graphs counts where they are taken.
        """
        plain = self.seconds
        if not plain:
            return None
        seconds = {plan: taken_s(plan, plain, self.graphs_s) for plan in plain}
        quickest = min(seconds, key=lambda plan: seconds[plan])
        if before in seconds and seconds[before] <= CHANGE * seconds[quickest]:
            return before
        first = self.plans[0]
        if before is None and first in seconds:
            least, copies = 1.0 if self.limit is None else NEAR, self._counted[quickest]
            sure_s = max(copies) if len(copies) <= COUNTED else seconds[quickest]
            if seconds[quickest] < plain[quickest]:  # by graphs, of which it is the slower copy's
                sure_s = seconds[quickest]
            if least * sure_s >= seconds[first]:
                return first
        return quickest


def taken_s(plan: ParallelPlan, seconds: Mapping[ParallelPlan, float], graphs_s: Mapping[ParallelPlan, float]) -> float:
    """What a step takes under the plan: by graphs where they are clearly quicker."""
    by_graphs = graphs_s.get(plan, math.inf)
    return by_graphs if GRAPHS_GAIN * by_graphs <= seconds[plan] else seconds[plan]


@dataclass(frozen=True, kw_only=True)
class KeptPlan:
    """What tries of one kind of work found: the plan that is kept, seconds of a step by plan, and plans that failed.

    `expected_s`: what a step of a run under `plan` took, or took in its try where no run has ended yet. `again`: runs
    have come to take so much longer that another plan may be better, so the plans are tried again before the next.
    `graphs_s`: what a step took with a CUDA graph of each block, at most, under plans that were tried so.
    """

    plan: ParallelPlan
    seconds: Mapping[ParallelPlan, float]
    failed: Mapping[ParallelPlan, str] = field(default_factory=dict)
    expected_s: float = 0.0
    again: bool = False
    graphs_s: Mapping[ParallelPlan, float] = field(default_factory=dict)

    @property
    def by_graphs(self) -> bool:
        """Whether blocks run as CUDA graphs: they were clearly quicker."""
        return self.taken_s(self.plan) < self.seconds[self.plan]

    def taken_s(self, plan: ParallelPlan) -> float:
        """What a step of a tried plan takes, by graphs where they are taken."""
        return taken_s(plan, self.seconds, self.graphs_s)

    def __post_init__(self) -> None:
        if self.plan not in self.seconds:
            raise ValueError(f"{self.plan.describe()} is kept, and no seconds of it are known; give them")

    @property
    def plans(self) -> tuple[ParallelPlan, ...]:
        """All that were tried and worked, the kept one first."""
        return (self.plan, *(plan for plan in self.seconds if plan != self.plan))

    @property
    def text(self) -> str:
        """A line, such as `tried ring 2: 0.92x, kept ulysses 2`: the other plans' speeds relative to the kept one's."""
        kept_s = self.taken_s(self.plan)
        others = sorted((plan for plan in self.seconds if plan != self.plan), key=self.taken_s)
        told = [f"{in_words(plan)}: {kept_s / self.taken_s(plan):.2f}x" for plan in others]
        told += [f"{in_words(plan)}: {why}" for plan, why in self.failed.items()]
        if self.plan in self.graphs_s:
            told.append(f"graphs of blocks: {self.seconds[self.plan] / self.graphs_s[self.plan]:.2f}x")
        if self.by_graphs:
            return f"tried {', '.join(told)}, kept {in_words(self.plan)} with graphs of blocks"
        return f"tried {', '.join(told)}, kept {in_words(self.plan)}" if told else f"kept {in_words(self.plan)}"

    def after_run(self, step_s: float) -> "KeptPlan":
        """With what a step of a whole run took under the kept plan, which has the plans tried again where that is more
        than `CHANGE` times what was expected and than another plan's try took."""
        slower = step_s > CHANGE * self.expected_s
        beaten = any(step_s > CHANGE * self.taken_s(plan) for plan in self.seconds if plan != self.plan)
        if slower and beaten:
            return replace(self, again=True, expected_s=step_s)
        return replace(self, expected_s=min(self.expected_s, step_s))


def kept_of(tries: Tries, before: KeptPlan | None = None) -> KeptPlan | None:
    """What is kept of tries that have ended; None where no plan worked, and where there was nothing to compare.

    `before`: what was kept and is tried again. Its plan stays where none is clearly quicker, unless it was tried alone.
    """
    seconds = tries.seconds
    best = tries.best(before.plan if before is not None and len(before.seconds) > 1 else None)
    if best is None:
        return None
    graphs_s = {plan: step_s for plan, step_s in tries.graphs_s.items() if plan in seconds and step_s < math.inf}
    kept = KeptPlan(plan=best, seconds=seconds, failed=dict(tries.failed), graphs_s=graphs_s)
    kept = replace(kept, expected_s=kept.taken_s(best))
    if before is None or before.plan != best:
        return kept
    return replace(kept, expected_s=max(kept.expected_s, before.expected_s))  # runs are known to take longer than tries


def proof_pays(tries: Tries, plan: ParallelPlan, *, own: ParallelPlan, steps: int, times: int = 1) -> bool:
    """Whether a run of so many steps under `own` may have `plan`, found quicker, proven before it goes on: with that it
    takes `LIMIT` steps longer at most, less what the plan gains. A proof is a call by the plan, one without its
    exchanges and one by a single device, each `times` over."""
    seconds = tries.seconds
    if tries.limit is None or own not in seconds or plan.parts == 1:
        return True
    proof_s = times * (2 + plan.parts) * seconds[plan]
    gained_s = steps * (seconds[own] - seconds[plan])
    return tries.spent_s + proof_s - gained_s <= tries.limit * seconds[own]


def changed_text(before: KeptPlan, kept: KeptPlan) -> str:
    """That another plan is kept from now on; "" where it is the same."""
    if before.plan == kept.plan:
        return ""
    if before.plan in kept.seconds:
        gain = f"{kept.taken_s(before.plan) / kept.taken_s(kept.plan):.2f}x as fast"
    else:
        gain = kept.failed.get(before.plan, "it cannot be used")
    return f"changed from {in_words(before.plan)} to {in_words(kept.plan)}, measured again: {gain}"
