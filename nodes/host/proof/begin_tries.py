"""Which sampling runs try plans before their first step, and what of earlier tries a run begins with.

Owns what tries are kept by here (`key_of`), and what is known of a MODEL between its runs (`Tunable`). Does not own how
plans are tried (trying.py), nor the tries that a user asks for (tuning.py).
"""

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from ....parallel_runtime.plan import ParallelPlan
from ....parallel_runtime.planner.automatic import Decision
from ....parallel_runtime.planner.choose import GRAPHS_LEAVE, HEADROOM, Prediction
from ....parallel_runtime.planner.kept_plans import TriesKey
from ....parallel_runtime.planner.machine import device_set, identity, whole_bytes
from ....parallel_runtime.planner.memory import fits_by_shares
from ....parallel_runtime.planner.tries import (
    LIMIT,
    MIN_STEPS,
    graphs_pay,
    graphs_pay_at_once,
    in_words,
    worth_trying,
)
from ....parallel_runtime.planner.work import Work
from ....parallel_runtime.weight_delta import WeightDeltas
from ..model.patcher import RemotePatcher
from ..model.pooled_model import PooledModel
from ..model.source import refuse_unplanned
from .idle_tries import IDLE, IdleTrier
from .proving import Prover
from .trying import Trier, store

DRIVER = Path("/proc/driver/nvidia/version")
UNKNOWN = "how fast these devices are is unknown; run `python -m parallel_runtime doctor --calibrate` once"
TEXT_ROUNDED_TO = 64  # tokens: prompts of nearly one length are one kind of work


@dataclass(frozen=True, kw_only=True)
class Tunable:
    """What runs of a MODEL have in common, without the MODEL, which ends when ComfyUI lets it go.

    `choose_again` is None where its plan was not predicted; `why_not` says why no other than that is tried, "" where
    others are.
    """

    pooled: PooledModel
    prover: Prover
    decision: Decision
    choose_again: Callable[[Work], Decision] | None
    deltas: WeightDeltas
    compiled: bool
    attention: str
    exchange: str
    side_branch: bool
    step_cache: float
    tries: bool
    shares: tuple[int, ...]

    @classmethod
    def of(cls, patcher: RemotePatcher, shares: tuple[int, ...]) -> "Tunable":
        """That of a MODEL whose devices have these `shares`."""
        same = ("decision", "choose_again", "compiled", "attention", "exchange", "side_branch", "step_cache", "tries")
        found = {name: getattr(patcher, name) for name in same}
        model = patcher.model
        return cls(pooled=model.pooled, prover=model.prover, deltas=patcher.delta_set(), shares=shares, **found)

    @property
    def why_not(self) -> str:
        """With the remedy."""
        if not self.tries:
            return "tries is off in SP Config, so no run would take what is found; set it to auto"
        if self.choose_again is not None:
            return "" if self.decision.table else UNKNOWN
        if not self.decision.automatic:
            return "SP Config's mode is manual, so its plan always runs; set mode to auto"
        if self.decision.plan.ranks == 1:
            return f"auto takes {in_words(self.decision.plan)} for this model; name more devices in SP Config"
        return f"plans are not predicted: {self.decision.reasons[-1]}" if self.decision.reasons else UNKNOWN

    def table(self, decision: Decision) -> list[Prediction]:
        """The plans of a decision that fit, and that the model can have, with the shares of its devices."""
        rows = [row for row in decision.table if row.fits and (not self.shares or self.has_room(row))]
        rows = [replace(row, plan=row.plan.with_shares(self.shares)) for row in rows]
        return [row for row in rows if self._takes(row.plan)]

    def has_room(self, row: Prediction, *, by_graphs: bool = False) -> bool:
        """Whether each device has what its share of a plan takes, as planned with equal ones; `by_graphs`: with a CUDA
        graph of each block."""
        room = [HEADROOM * each for each in whole_bytes(self.pooled.devices)]
        memory = row.memory
        if by_graphs:
            room = [each - GRAPHS_LEAVE for each in room]
            memory = replace(memory, buffers=memory.buffers + memory.graphs)
        return fits_by_shares(memory, row.plan.with_shares(self.shares), room)

    def _takes(self, plan: ParallelPlan) -> bool:
        try:
            refuse_unplanned(self.prover.transformer, plan)
        except ValueError:
            return False
        return True


@dataclass(frozen=True, kw_only=True)
class LastRun:
    """The sampling run that began last with some weights.

    `of`: its MODEL; `work` where that is known; `sizes` of its latent, as the report has them.
    """

    of: Tunable
    work: Work | None
    sizes: Mapping[str, int]

    @property
    def described(self) -> dict[str, object]:
        """For the panel: the model, what was sampled, and why no plans are tried for it, "" where some are."""
        found: dict[str, object] = {"model": os.path.basename(self.of.pooled.spec.path), "why_not": self.of.why_not}
        if self.work is not None:
            found |= {"text_tokens": self.work.text_tokens, "guided": self.work.guided}
        return found | dict(self.sizes)


def with_tries(of: Tunable, work: Work | None, decision: Decision) -> tuple[Decision, "Trier | IdleTrier | None"]:
    """The plan that a run of `work` begins under, where `decision` is the prediction, and what tries others before its
    first step and after the run, or only hears of its end. None where nothing is tried or kept: a plan that was not
    predicted, or `tries` off."""
    of, decision = _with_room(of, decision)
    decision = replace(decision, plan=decision.plan.with_shares(of.shares))
    if not of.tries or of.choose_again is None or work is None or not decision.automatic:
        return decision, None
    table, short = of.table(decision), work.steps < MIN_STEPS
    graphs = under_graphs(of, table)
    usable, key = {row.plan for row in table}, key_of(of, work, graphs=bool(graphs))
    options = {"steps": work.steps, "asynchronous": is_asynchronous(of), "compiled": of.compiled}
    worth = functools.partial(worth_trying, table, decision.plan, **options)
    kept = store().load(key)
    if kept is None or kept.plan not in usable:
        kept, soon = None, worth(idle=False)
        plans = worth(idle=True) or ((decision.plan,) if decision.plan in graphs else ())
    else:
        plans = soon = tuple(plan for plan in kept.plans if plan in usable) if kept.again else ()
        if plans and graphs:  # some may not have been tried yet
            plans = tuple(dict.fromkeys((*plans, *worth(idle=True))))
        if kept.by_graphs and not graphs_pay(kept.seconds[kept.plan], kept.taken_s(kept.plan), steps=work.steps):
            graphs = frozenset()
        text = kept.text if kept.plan in graphs else replace(kept, graphs_s={}).text
        reason = f"measured on these devices: {text}"
        decision = replace(decision, plan=kept.plan, reasons=(*decision.reasons, reason))
    if graphs.intersection(plans):  # of which copies without would tell little
        own = [row for row in table if row.plan == decision.plan and row.plan in graphs]
        waits = kept is None and IDLE.waits(key) and any(graphs_pay_at_once(row, steps=work.steps) for row in own)
        soon = (decision.plan,) if waits else ()
    if kept is None and not plans:
        return decision, None
    known = {"rows": work.rows, "prover": of.prover, "kept": kept, "graphs": graphs}
    trier = Trier(key=key, plans=plans, asynchronous=is_asynchronous(of), **known)
    if not plans:
        return decision, trier
    memory = {row.plan: row.memory for row in table if row.plan in plans}
    limit = None if graphs.intersection(soon) else LIMIT
    now = None
    if soon and (limit is None or not short):
        now = replace(trier, plans=soon, limit=limit, alone=limit is None and len(plans) > 1)
    return decision, IdleTrier(trier=trier, memory=memory, later=IDLE.offer, now=now)


def _with_room(of: Tunable, decision: Decision) -> tuple[Tunable, Decision]:
    """With equal shares, and a reason, where a rank would have no room for what it is to compute by `of.shares`."""
    row = next((each for each in decision.table if each.plan == decision.plan), None)
    if not of.shares or row is None or not row.fits or of.has_room(row):
        return of, decision
    text = f"shares {':'.join(map(str, of.shares))} leave a device no room for its share, so shares are equal"
    return replace(of, shares=()), replace(decision, reasons=(*decision.reasons, text))


def under_graphs(of: Tunable, table: list[Prediction]) -> frozenset[ParallelPlan]:
    """The plans that are predicted to be quicker with blocks as CUDA graphs, and leave room for their memory."""
    rows = [row for row in table if row.without_graphs is not None]
    return frozenset(row.plan for row in rows if of.has_room(row, by_graphs=True))


def is_asynchronous(of: Tunable) -> bool:
    """Whether the devices run ahead of the host."""
    return of.pooled.devices[0].kind != "cpu"


def key_of(of: Tunable, work: Work, *, graphs: bool) -> TriesKey:
    """What seconds of a step at such work hold for; `graphs`: some plans may gain by them in so many steps."""
    pooled, known = of.pooled, of.prover.key(of.decision.plan, ())
    beside = of.side_branch and len(of.deltas.deltas)  # each costs a little in every step
    options = {"compiled": of.compiled, "attention": of.attention, "side_branch": beside}
    text_tokens = -(-work.text_tokens // TEXT_ROUNDED_TO) * TEXT_ROUNDED_TO
    rounded = replace(work, exchange=of.exchange, text_tokens=text_tokens, graphs=graphs)
    sizes = {name: str(value) for name, value in asdict(rounded).items() if name != "steps"}
    return TriesKey(
        devices=(device_set(pooled.devices), *map(identity, pooled.devices)),
        driver=_driver(),
        torch=torch.__version__,
        comfyui=known.comfyui,
        pack=known.pack,
        model=f"{known.model_class} {known.source} {pooled.sizes.total}",
        weights=f"{known.weights} {pooled.plan.layout.name} on {pooled.plan.ranks}",
        kernels=" ".join([known.kernels, *(f"{name}={value}" for name, value in options.items() if value)]),
        work=tuple(sorted(sizes.items())),
    )


@functools.cache
def _driver() -> str:
    """What the driver of NVIDIA's devices says of itself; "" without one."""
    try:
        return DRIVER.read_text(encoding="utf-8").partition("\n")[0].strip()
    except (OSError, ValueError):
        return ""
