"""Which groups of ranks exchange something under a plan, in the order in which they are made.

Owns their names, and what ranks are told of their link, which the parent, the ranks and the planner share. Makes no
process group: `worker/mesh.py` does.
"""

import functools
from dataclasses import dataclass

from .plan import PLAN_AXES, TOKEN_AXES, Layout, ParallelPlan

GROUPED_AXES = tuple(name for name, axis in PLAN_AXES.items() if axis.grouped)
ACTIVATIONS, LINK, WEIGHTS = "activations", "link", "weights"


@dataclass(frozen=True, kw_only=True)
class OverlapRates:
    """What the choice must know of devices and link. All ranks that share heads are given the same.

    `attention_flops`: FLOP/s of one rank's attention; `bandwidth`: bytes/s that one rank sends in an all-to-all of
    these ranks; `latency_s`: of one collective call; `most_chunks`: 0 where no figure of the device limits them.
    """

    attention_flops: float
    bandwidth: float
    latency_s: float
    most_chunks: int = 0


@dataclass(frozen=True, kw_only=True)
class ExchangeGroup:
    """Ranks that exchange one kind of thing, so that nothing of another kind waits behind it."""

    purpose: str
    ranks: tuple[int, ...]


@functools.cache
def groups_of(plan: ParallelPlan, num_ranks: int) -> tuple[ExchangeGroup, ...]:
    """The groups of a plan among `num_ranks` ranks, without the one of all of them, which is there before any plan.

    Replicas exchange nothing and have none.
    """
    runs = [run for axis in GROUPED_AXES if getattr(plan, axis) > 1 for run in runs_along(plan, axis)]
    if has_sequence_group(plan):
        runs += runs_along(plan, *TOKEN_AXES)
    found = [ExchangeGroup(purpose=ACTIVATIONS, ranks=run) for run in runs if len(run) < num_ranks]
    found += [ExchangeGroup(purpose=LINK, ranks=link) for link in links_of(plan)]
    return (*found, *weight_groups(plan.layout))


def weight_groups(layout: Layout) -> tuple[ExchangeGroup, ...]:
    """The ranks that hold weights together, those of a replica that have the same stage; none where each has all."""
    runs = dict.fromkeys(layout.holders_of(rank) for rank in range(layout.ranks) if layout.shards > 1)
    return tuple(ExchangeGroup(purpose=WEIGHTS, ranks=run) for run in runs)


def runs_along(plan: ParallelPlan, *axes: str) -> list[tuple[int, ...]]:
    """The ranks that differ in their place on these axes alone, run by run, the last axis innermost."""
    runs: dict[tuple[int, ...], list[int]] = {}
    for rank in range(plan.ranks):
        elsewhere = tuple(index for axis, index in plan.coordinates(rank).items() if axis not in axes)
        runs.setdefault(elsewhere, []).append(rank)
    return [tuple(run) for run in runs.values()]


def has_sequence_group(plan: ParallelPlan) -> bool:
    """Whether ranks that share a sequence need a group of all of them, which no axis alone has. Stages do without."""
    return plan.pipefusion == 1 and plan.parts > max(getattr(plan, axis) for axis in TOKEN_AXES)


def links_of(plan: ParallelPlan) -> list[tuple[int, int]]:
    """(sender, receiver): from each stage to the next, and from the last to the first. None without stages."""
    if plan.pipefusion == 1:
        return []
    runs = runs_along(plan, "pipefusion")
    return [link for run in runs for link in zip(run, (*run[1:], run[0]), strict=True)]
