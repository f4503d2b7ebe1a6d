"""What SP Config would do with some values, before anything is queued: by the node's own code, so that both agree."""

from collections.abc import Mapping

from comfy_api.latest import io

from ..parallel_runtime.models.registry import USUAL
from ..parallel_runtime.planner.automatic import usual_work
from .config import ParallelChoice, SPConfig


def check_plan(values: Mapping[str, str]) -> dict:
    """`plan`, `degrees`, `devices`, `reasons` and `warnings`, or `error` with the text that the node would show.

    `values` are the node's inputs by name, as texts; what is missing has its default, what is unknown is ignored.
    """
    try:
        choice = SPConfig.execute(**_typed(values)).args[0]
        return _described(choice)
    except ValueError as error:
        return {"error": str(error)}


def _typed(values: Mapping[str, str]) -> dict[str, object]:
    """Raises `ValueError` for a number that is none."""
    typed: dict[str, object] = {}
    for each in SPConfig.define_schema().inputs:
        if each.id not in values:
            typed[each.id] = each.default
        elif isinstance(each, io.Int.Input):
            typed[each.id] = _number(each.id, values[each.id])
        else:
            typed[each.id] = values[each.id]
    return typed


def _number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise ValueError(f"{name}={text!r} is not a whole number; use 1 or more") from error


def _described(choice: ParallelChoice) -> dict:
    decision = choice.plan_for(USUAL.usual, usual_work())
    plan = decision.plan
    _, *reasons = choice.told(decision)
    return {
        "plan": plan.name,
        "degrees": plan.to_dict(),
        "devices": [str(device) for device in choice.selection.devices],
        "reasons": reasons,
        "warnings": list(choice.selection.warnings),
    }
