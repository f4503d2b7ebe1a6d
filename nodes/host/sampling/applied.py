"""What a run's MODEL and conditionings have applied to them, as a report says it: LoRAs and ControlNets.

ComfyUI hands on their tensors and no name of a file. So each is known by a short name made of what it holds, the same
for the same file in any process. Owns that name and those parts; what may be compared is `report/compare.py`'s.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from ..contract.comfyui import ControlBase, ModelPatcher
from ..model.patcher import RemotePatcher

LOOKED_INTO = 32  # tensors of a set whose numbers count, and of each the first few: of all the others the shape does
NUMBERS = 4
NAME_CHARS = 12
SIDES = ("positive", "negative")


def applied_to(model: ModelPatcher, settings: Mapping[str, object]) -> dict:
    """`patches` of a parallel MODEL and `controls` of a run with KSampler's inputs, those of them that there are."""
    found = {"patches": _patches(model), "controls": [_control(each) for each in _controls(settings)]}
    return {name: part for name, part in found.items() if part}


def _patches(model: ModelPatcher) -> dict:
    if not isinstance(model, RemotePatcher) or not (deltas := model.delta_set().deltas):
        return {}
    named = [(f"{each.key} {each.kind} {place}", value) for each in deltas for place, value in enumerate(each.values)]
    return {
        "name": _name((name, value) for name, value in named if isinstance(value, torch.Tensor)),
        "weights": len({each.key for each in deltas}),
        "strengths": sorted({each.strength for each in deltas}),
        "side_branch": model.side_branch,
    }


def _controls(settings: Mapping[str, object]) -> list[ControlBase]:
    """The ControlNets of both conditionings with those before them, each once, in order."""
    found: dict[int, ControlBase] = {}
    for side in SIDES:
        conds = settings.get(side)
        for _, values in conds if isinstance(conds, Sequence) else ():
            control = values.get("control")
            while control is not None:
                found.setdefault(_same(control), control)
                control = getattr(control, "previous_controlnet", None)
    return list(found.values())


def _same(control: ControlBase) -> int:
    """Copies of one ControlNet, as both sides have them, share the picture that they were given."""
    hint = getattr(control, "cond_hint_original", None)
    return id(control if hint is None else hint)


def _control(control: ControlBase) -> dict:
    start, end = getattr(control, "timestep_percent_range", (0.0, 1.0))
    return {
        "kind": type(control).__name__,
        "name": _name(_tensors(control)),
        "strength": float(getattr(control, "strength", 1.0)),
        "start": float(start),
        "end": float(end),
    }


def _tensors(control: ControlBase) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights that a ControlNet of any class keeps: those of its modules, or in a dict."""
    for value in vars(control).values():
        kept = value.state_dict() if isinstance(value, torch.nn.Module) else value if isinstance(value, dict) else {}
        yield from ((str(name), tensor) for name, tensor in kept.items() if isinstance(tensor, torch.Tensor))


def _name(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """A short name of named tensors, by their shapes and some of their numbers."""
    ordered = sorted(tensors, key=lambda each: each[0])
    apart = max(1, len(ordered) // LOOKED_INTO)
    digest = hashlib.sha256()
    for place, (name, tensor) in enumerate(ordered):
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        if place % apart == 0 and not tensor.is_meta:
            digest.update(str(tensor.detach().reshape(-1)[:NUMBERS].float().tolist()).encode())
    return digest.hexdigest()[:NAME_CHARS]
