"""CFG parallel: the conditionings that ComfyUI would run one after the other go to the pool together.

Conditionings that fit into one batch stay one call, whose rows the pool shares out. Where stock ComfyUI makes several
calls (texts of different lengths, areas, a ControlNet on one side), each is run by ComfyUI's own function in a task,
and their results are combined with its own weights. Owns what goes into which task and the sum of their results. Does
not own whether that may be (order.py) nor the turns (cooperative_tasks.py).
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ....parallel_runtime.plan import ParallelPlan, auto_plan
from ..contract.allocations import forget_records
from ..contract.comfyui import WrapperExecutor, comfy
from ..contract.order import why_calls_keep_order
from ..contract.version import off
from ..panel.progress import NodeText, OncePerPrompt
from ..sampling.run_context import RunContext, run_of
from .cooperative_tasks import inside_a_task, run_in_turns

log = logging.getLogger(__name__)
TOGETHER_KEY = "parallel_dit_together"
TINY = 1e-37  # what ComfyUI starts its sums of weights with, so that none is divided by zero
TOLD_IDLE = OncePerPrompt()
TOLD_ORDER = OncePerPrompt()

Conds = Sequence[Sequence[dict] | None]


@dataclass(frozen=True)
class Entry:
    """One conditioning that is active now: which output it is for, and ComfyUI's description of where it applies."""

    cond: dict
    output: int
    place: Any  # ComfyUI's `cond_obj`


def calc_together(
    executor: WrapperExecutor,
    model: torch.nn.Module,
    conds: Conds,
    x_in: torch.Tensor,
    timestep: torch.Tensor,
    model_options: dict,
) -> list[torch.Tensor]:
    """A wrapper of ComfyUI's `calc_cond_batch`: same arguments, same results, fewer requests to the pool.

    Goes behind all others first, so that they see one call, as ever: EasyCache's begins a step.
    """
    behind = executor.wrappers[executor.idx + 1 :]
    if behind:
        last = behind if calc_together in behind else [*behind, calc_together]
        return WrapperExecutor.new_executor(executor.original, last).execute(
            model, conds, x_in, timestep, model_options
        )
    whole = partial(executor, model, conds, x_in, timestep, model_options)
    run = run_of(model_options)
    if run is None or run.plan.batch_groups == 1 or run.captured is not None or off("cfg"):
        return whole()
    if vars(model).get("pooled") is not run.model:  # a guider may run another model with our options
        return whole()
    tell_idle(run, sum(map(len, filter(None, conds))) * x_in.shape[0])
    entries = list(_active(conds, x_in, timestep))
    groups = _together(entries)
    if len(groups) < 2:
        return whole()
    reason = why_calls_keep_order(model.current_patcher.callbacks, [entry.cond for entry in entries], model_options)
    if reason is not None:
        if TOLD_ORDER.first_time():
            log.info("conditionings run one after the other: %s", reason)
        return whole()
    tasks = [partial(executor, model, _only(group, conds), x_in, timestep, model_options) for group in groups]
    outs = run_in_turns(tasks, at_once=len(tasks), at_end=forget_records)
    return _combined(outs, groups, len(conds), x_in)


def _active(conds: Conds, x_in: torch.Tensor, timestep: torch.Tensor) -> Iterator[Entry]:
    for output, entries in enumerate(conds):
        for cond in entries or ():
            place = comfy.samplers.get_area_and_mult(cond, x_in, timestep)
            if place is not None:
                yield Entry(cond, output, place)


def _together(entries: list[Entry]) -> list[list[Entry]]:
    """The entries as ComfyUI puts them into batches, in the order of its calls."""
    groups = []
    while entries:
        first = entries[0].place
        fits = [comfy.samplers.can_concat_cond(entry.place, first) for entry in entries]
        groups.append([entry for entry, fitting in zip(entries, fits, strict=True) if fitting])
        entries = [entry for entry, fitting in zip(entries, fits, strict=True) if not fitting]
    return groups


def _only(group: list[Entry], conds: Conds) -> list[list[dict] | None]:
    """`conds` with the entries of one group alone."""
    return [
        None if entries is None else [entry.cond for entry in group if entry.output == output]
        for output, entries in enumerate(conds)
    ]


def _combined(
    results: list[list[torch.Tensor]], groups: list[list[Entry]], outputs: int, x_in: torch.Tensor
) -> list[torch.Tensor]:
    """The mean of each output over the groups that have a part in it, weighted as ComfyUI weights entries."""
    combined = []
    for output in range(outputs):
        parts = [
            (result[output], [entry for entry in group if entry.output == output])
            for result, group in zip(results, groups, strict=True)
        ]
        parts = [(mean, entries) for mean, entries in parts if entries]
        if len(parts) < 2:
            combined.append(parts[0][0] if parts else torch.zeros_like(x_in))
            continue
        weights = [_weight(entries, x_in) for _, entries in parts]
        total = sum(mean * weight for (mean, _), weight in zip(parts, weights, strict=True))
        combined.append(total / sum(weights))
    return combined


def _weight(entries: list[Entry], x_in: torch.Tensor) -> torch.Tensor:
    """How much a group's result counts, at each place of the latent."""
    weight = torch.full_like(x_in, TINY)
    for entry in entries:
        where, area = weight, entry.place.area
        for dim in range(0 if area is None else len(area) // 2):
            where = where.narrow(dim + 2, area[len(area) // 2 + dim], area[dim])
        where += entry.place.mult
    return weight


def tell_idle(run: RunContext, rows: int) -> None:
    """Say once a prompt that there is less to share out than there are batch groups, and which plan would use all
    ranks."""
    plan = run.plan
    groups = plan.cfg if inside_a_task() else plan.batch_groups
    if rows < groups and TOLD_IDLE.first_time():
        ranks_a_group = plan.ranks // plan.batch_groups
        idle = (groups - rows) * ranks_a_group
        bigger = f"a bigger batch, or {rows * ranks_a_group} device(s)"
        if run.model.shares_tokens:
            bigger = f"{_better(plan, rows, run.model.num_heads).describe()} in SP Config, or a bigger batch"
        message = (
            f"{plan.describe()}: a step has {rows} row(s) for {groups} batch groups (cfg scale 1 takes one "
            f"conditioning), so {idle} of {groups * ranks_a_group} ranks idle; use {bigger}"
        )
        log.warning(message)
        NodeText().say(message)


def _better(plan: ParallelPlan, rows: int, num_heads: int) -> ParallelPlan:
    """A plan of as many ranks without idle ones, for `rows` rows a step."""
    cfg = plan.cfg if rows % plan.cfg == 0 else 1
    return replace(auto_plan(plan.ranks // cfg, num_heads), cfg=cfg, weights=plan.weights)
