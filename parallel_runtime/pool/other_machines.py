"""When ranks start anew because other machines are there, or are needed, than when they started; when that is vain."""

from collections.abc import Callable, Sequence

from ..devices import Device
from ..errors import PoolError
from ..machines.machine import Machine
from ..plan import ParallelPlan, refuse_unfit_machines
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


def refuse_without(plan: ParallelPlan, devices: Sequence[Device], machines: Sequence[Machine], died: PoolError) -> None:
    """Raise PoolError, what ranks have died of since the last request, where the plan cannot run on who is left.

    `devices` as `Pool` has it, of this machine first; `machines` are those that are there.
    """
    here = sum(not device.machine for device in devices)
    try:
        refuse_unfit_machines(plan, [here, *(len(machine.devices) for machine in machines)])
    except ValueError:
        raise PoolError(  # a copy, so that what is remembered of the failure keeps no frame alive
            died.cause, rank=died.rank, device=died.device, remedy=died.remedy, detail=died.detail
        ) from None
