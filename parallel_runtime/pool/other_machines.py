"""When ranks start anew because other machines are there than when they started, or are needed."""

from collections.abc import Callable, Sequence

from ..machines.machine import Machine
from ..plan import ParallelPlan
from .held_weights import Check
from .worker_group import WorkerGroup


def too_few(
    workers: WorkerGroup, plan: ParallelPlan | None, machines: Callable[[Check], Sequence[Machine]], check: Check
) -> bool:
    """Whether the plan, or anything without one, needs a machine that was left out, or one that has joined since.

    All ranks make a plan's groups together, so once a machine was left out only plans that have theirs run on.
    `machines` as `Pool` has it.
    """
    reach, all_ranks = workers.generation.reach(), len(workers.generation.ranks)
    if reach < all_ranks:
        held = [model.layout for model in workers.models]
        return plan is None or plan.ranks > reach or workers.meshes.change_for(plan, held, new_handle=int) is not None
    if plan is None or plan.ranks <= all_ranks:
        return False
    return any(machine not in workers.generation.machines for machine in machines(check))
