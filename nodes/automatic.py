"""Auto's look at the machine, and the decision with it. Starts no worker; the rule is the planner's.

Free memory is counted as all of a device's: ComfyUI gives up its own models for ours, our weights of an earlier prompt
must not count against themselves, and asking a device for what is free would take a CUDA context's worth of it. What
other programs hold is therefore not seen.
"""

from collections.abc import Sequence

from ..parallel_runtime.devices import Device
from ..parallel_runtime.plan import ParallelPlan
from ..parallel_runtime.planner.automatic import Decision, automatic_plan, plan_of_run
from ..parallel_runtime.planner.counted import CountedModel
from ..parallel_runtime.planner.hardware import Calibration
from ..parallel_runtime.planner.machine import constants, measured, whole_bytes
from ..parallel_runtime.planner.work import Work


def decide(
    model: CountedModel, work: Work, devices: Sequence[Device], weights: str, everything: ParallelPlan | None = None
) -> Decision:
    """The automatic plan on these devices of this machine; `everything` as the planner takes it.

    Raises `ValueError` when one device is asked to shard.
    """
    free, known = whole_bytes(devices), _constants(devices)
    return automatic_plan(model, work, devices, free, known, weights=weights, everything=everything)


def are_known(devices: Sequence[Device]) -> bool:
    """Whether plans on these devices can be weighed."""
    return _constants(devices) is not None


def decide_again(model: CountedModel, work: Work, devices: Sequence[Device], held: ParallelPlan) -> Decision:
    """The plan of a sampling run of `work`, with weights that were loaded for `held`; `held` where nothing is known."""
    calibration = _constants(devices)
    if calibration is None:
        return Decision(plan=held)
    return plan_of_run(model, work, whole_bytes(devices), calibration, held=held)


def _constants(devices: Sequence[Device]) -> Calibration | None:
    try:
        return measured(devices) if devices[0].kind == "cpu" else constants(devices)
    except ValueError:  # neither calibrated nor in the table
        return None
