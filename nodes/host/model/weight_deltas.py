"""ComfyUI's record of changed weights as the workers take it: LoRA and its relatives, full differences, offsets.

Owns the reading of ComfyUI's patch tuples and the refusal of those that cannot travel. Computes nothing.
"""

from collections.abc import Mapping, Sequence

import torch

from ....parallel_runtime.weight_delta import KINDS, WeightDelta, WeightDeltas
from ..contract.comfyui import LoRAAdapter, adapters, comfy
from ..contract.refusals import refuse_by
from ..contract.version import refuse_off
from ..contract.writers import nodes_like

PREFIX = "diffusion_model."


def delta_set(
    patches: Mapping[str, Sequence[tuple]],
    uuid: object,
    *,
    side_branch: bool = False,
    beside: tuple[WeightDelta, ...] = (),
) -> WeightDeltas:
    """The patches of a ModelPatcher, by ComfyUI's keys; `uuid` is its name for them.

    `beside`: weights that go with them (block_hooks.py). Raises `ValueError` for what cannot travel, naming the
    weight.
    """
    if not patches and not beside:
        return WeightDeltas()
    if patches:
        refuse_off("loras")
    changes = tuple(_patch(key, entry) for key, entries in patches.items() for entry in entries)
    modules = sorted({each.key.partition("/")[0] for each in beside})
    return WeightDeltas(" ".join([str(uuid), *modules]), (*changes, *beside), side_branch)


def _patch(key: str, entry: tuple) -> WeightDelta:
    strength, change, strength_model, offset, function = entry
    if function is not None and function is not comfy.utils.swap_scale_shift:
        raise refuse_by(nodes_like("lora"), f"it changes {key} through a function of its own")
    kind, values = _values(key, change)
    return WeightDelta(
        key=key.removeprefix(PREFIX),
        kind=kind,
        strength=float(strength),
        values=values,
        strength_model=float(strength_model),
        offset=None if offset is None else tuple(offset),
        swap=function is not None,
    )


def _values(key: str, change: object) -> tuple[str, tuple[torch.Tensor | float | None, ...]]:
    """The kind of a change and its formula's values; see `weight_delta.py`."""
    if isinstance(change, LoRAAdapter):
        up, down, alpha, middle, dora, reshape = change.weights
        if middle is None and reshape is None:
            return "lora", (up, down, alpha, dora)
        return "lora_core", (up, down, alpha, middle, dora, None if reshape is None else torch.tensor(reshape))
    if isinstance(change, tuple(adapters)) and change.name in KINDS:
        return change.name, tuple(change.weights)
    if isinstance(change, tuple) and len(change) == 1:
        change = ("diff", change)
    if isinstance(change, tuple) and len(change) == 2 and change[0] in ("diff", "set"):
        kind, (tensor, *rest) = change
        return "padded_diff" if rest and rest[0].get("pad_weight") else kind, (tensor,)
    raise refuse_by(nodes_like("merge"), f"it changes {key} by another model's weights")
