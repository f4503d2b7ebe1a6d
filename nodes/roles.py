"""What a plan does with each device, in words for a user. Owns the lines; the words of an axis are plan.py's."""

from collections.abc import Sequence

from ..parallel_runtime.devices import Device
from ..parallel_runtime.plan import PLAN_AXES, ParallelPlan


def roles(plan: ParallelPlan, devices: Sequence[Device]) -> list[str]:
    """One line a device, in rank order: `cuda:0: replica 0, cond 0, 1/2 of the attention heads`, or `cuda:3 sleeps`."""
    return [
        f"{device}: {_role(plan, rank)}" if rank < plan.ranks else f"{device} sleeps"
        for rank, device in enumerate(devices)
    ]


def _role(plan: ParallelPlan, rank: int) -> str:
    words = [
        PLAN_AXES[axis].role.format(place=place, degree=degree)
        for (axis, place), degree in zip(plan.coordinates(rank).items(), plan.degrees, strict=True)
        if degree > 1
    ]
    if plan.shares:
        words.append(f"a share of {plan.shares[rank]} in {sum(plan.shares)}")
    layout = plan.layout
    if layout.shards > 1:
        words.append(f"shard {rank % layout.shards}/{layout.shards} of the weights")
    if layout.offloaded:
        words.append("weights in host memory")
    return ", ".join(words) or "the whole model"
