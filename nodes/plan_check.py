"""What SP Config would do with some values, before anything is queued: by the node's own code, so that both agree.

The page names the prompt's other models by its loaders alone; a run counts those behind Parallelize Model, too.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache

from ..parallel_runtime.planner.automatic import Decision
from ..parallel_runtime.planner.machine import calibration_identity
from .choice import ParallelChoice, choice_of
from .config import typed
from .host.model.files import diffusion_model_path, file_identity, is_missing
from .host.model.found_plans import LOOKING
from .host.model.models_beside import times_as_large
from .host.model.new_model import COUNTS, decide_for, memory_for, refuse_unfit
from .host.model.pooled_model import DeviceMemory
from .host.model.source import read_hosted


def check_plan(values: Mapping[str, str]) -> dict:
    """`plan`, `degrees`, `devices`, `reasons` and `warnings`, or `error` with the text that the nodes would show.

    `values` are SP Config's inputs by name, as texts; what is missing has its default, what is unknown is ignored. With
    `unet_name` (and `weight_dtype`) of a loader the plan is that file's, and `memory` says what it takes of a device:
    bytes of `device` and `host`, the device's `total`, whether that is of the weights alone, and which device is the
    `fullest` where not all are alike. `beside` names the files of further loaders on the same devices, a line each. A
    file that is not there yet is the loader's to tell: the plan is that of the usual model.
    """
    try:
        choice = choice_of(**typed(values))
        if (name := values.get("unet_name")) and not is_missing(name):
            beside = filter(None, values.get("beside", "").split("\n"))
            return _for_file(choice, name, values.get("weight_dtype", "default"), beside)
        return _described(choice, choice.usual_plan())
    except ValueError as error:
        return {"error": str(error)}


def _for_file(choice: ParallelChoice, name: str, weight_dtype: str, beside: Iterable[str]) -> dict:
    path, identity = diffusion_model_path(name), file_identity(name)
    measured = calibration_identity(), COUNTS.files, LOOKING.state()
    others = times_as_large(path, {diffusion_model_path(each) for each in beside if not is_missing(each)} - {path})
    decision, memory = _known(choice, path, weight_dtype, others, identity, measured)
    told = {
        "device": memory.device_bytes,
        "host": memory.host_bytes,
        "total": memory.total_bytes,
        "weights_alone": memory.weights_alone,
        "fullest": memory.fullest,
    }
    return _described(choice, decision) | {"memory": told}


@lru_cache(64)
def _known(
    choice: ParallelChoice, path: str, weight_dtype: str, beside: float, identity: object, measured: object
) -> tuple[Decision, DeviceMemory]:
    """The plan for a file as it lies there, and its memory.

    `identity` and `measured` are what the file, the calibrations, the counts and found plans are now: others ask anew.
    """
    devices = choice.selection.devices
    source = read_hosted(path, weight_dtype, devices)
    source = LOOKING.with_found(source, look=False) if choice.looks else source
    decision = decide_for(source, choice, beside=beside)
    refuse_unfit(source, decision.plan, choice)
    return decision, memory_for(source, decision, devices, choice.shares)


def _described(choice: ParallelChoice, decision: Decision) -> dict:
    plan = decision.plan
    _, *reasons = choice.told(decision)
    return {
        "plan": plan.name,
        "degrees": plan.to_dict(),
        "devices": [str(device) for device in choice.selection.devices[: plan.ranks]],  # others sleep
        "reasons": reasons,
        "warnings": list(choice.selection.warnings),
    }
