"""Which sampling runs try plans before their first step, and what of earlier tries a run begins with.

Owns what tries are kept by here (`key_of`). Does not own how plans are tried (trying.py).
"""

import functools
from dataclasses import asdict, replace
from pathlib import Path

import torch

from ....parallel_runtime.plan import ParallelPlan
from ....parallel_runtime.planner.automatic import Decision
from ....parallel_runtime.planner.kept_plans import TriesKey
from ....parallel_runtime.planner.machine import device_set
from ....parallel_runtime.planner.tries import MIN_STEPS, worth_trying
from ....parallel_runtime.planner.work import Work
from ..model.patcher import RemotePatcher
from ..model.source import refuse_unplanned
from .trying import Trier, store

DRIVER = Path("/proc/driver/nvidia/version")


def with_tries(
    patcher: RemotePatcher, work: Work | None, decision: Decision, shares: tuple[int, ...] = ()
) -> tuple[Decision, "Trier | None"]:
    """The plan that a run of `work` begins under, where `decision` is the prediction, and what tries others before its
    first step, or only hears of its end. None where nothing is tried or kept: a plan that was not predicted, or
    `tries` off. `shares` of the devices are those of all these plans."""
    table = [replace(row, plan=row.plan.with_shares(shares)) for row in decision.table]
    decision = replace(decision, plan=decision.plan.with_shares(shares))
    if not patcher.tries or patcher.choose_again is None or work is None or not decision.automatic:
        return decision, None
    usable = {row.plan for row in table if row.fits and _shares(patcher, row.plan)}
    key, prover = key_of(patcher, work), patcher.model.prover
    kept = store().load(key)
    if kept is not None and kept.plan not in usable:
        kept = None
    if kept is None:
        on_cpu = patcher.model.pooled.devices[0].kind == "cpu"
        table = [row for row in table if row.plan in usable]
        compiled = patcher.compiled
        plans = worth_trying(table, decision.plan, steps=work.steps, asynchronous=not on_cpu, compiled=compiled)
        return decision, Trier(key=key, plans=plans, rows=work.rows, prover=prover) if plans else None
    again = kept.again and work.steps >= MIN_STEPS
    plans = tuple(plan for plan in kept.plans if plan in usable) if again else ()
    reason = f"measured on these devices: {kept.text}"
    decision = replace(decision, plan=kept.plan, reasons=(*decision.reasons, reason))
    return decision, Trier(key=key, plans=plans, rows=work.rows, prover=prover, kept=kept)


def _shares(patcher: RemotePatcher, plan: ParallelPlan) -> bool:
    try:
        refuse_unplanned(patcher.model.diffusion_model, plan)
    except ValueError:
        return False
    return True


def key_of(patcher: RemotePatcher, work: Work) -> TriesKey:
    """What seconds of a step of this MODEL at such work hold for."""
    pooled, known = patcher.model.pooled, patcher.model.prover.key(patcher.plan, ())
    options = {"compiled": patcher.compiled, "attention": patcher.attention, "side_branch": patcher.side_branch}
    sizes = {name: str(value) for name, value in asdict(work).items() if name != "steps"}
    return TriesKey(
        devices=(device_set(pooled.devices), *map(str, pooled.devices)),
        driver=_driver(),
        torch=torch.__version__,
        comfyui=known.comfyui,
        pack=known.pack,
        model=f"{known.model_class} {known.source} {pooled.sizes.total}",
        weights=f"{known.weights} {pooled.plan.layout.name}",
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
