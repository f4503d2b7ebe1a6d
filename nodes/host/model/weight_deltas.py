"""ComfyUI's record of changed weights as the workers take it: LoRA and its relatives, full differences, offsets.

Owns the reading of ComfyUI's patch tuples, and which do not travel: refused ones, and those that do not fit their
weight. Computes nothing.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TypeAlias
from weakref import WeakKeyDictionary

import torch

from ....parallel_runtime.models.hosted.deltas import complaints
from ....parallel_runtime.weight_delta import KINDS, WeightDelta, WeightDeltas, misfit
from ..contract.comfyui import LoRAAdapter, adapters, comfy
from ..contract.refusals import refuse_by
from ..contract.version import refuse_off
from ..contract.writers import nodes_like

PREFIX = "diffusion_model."
_TRIED: WeakKeyDictionary[object, dict[tuple, bool]] = WeakKeyDictionary()  # by adapter: what it was found to fit
ShapeOf: TypeAlias = Callable[[str], Sequence[int] | None]  # by ComfyUI's key; None where it has no such weight


def delta_set(
    patches: Mapping[str, Sequence[tuple]],
    uuid: object,
    *,
    shape_of: ShapeOf,
    side_branch: bool = False,
    hook_weights: tuple[WeightDelta, ...] = (),
) -> WeightDeltas:
    """The patches of a ModelPatcher, by ComfyUI's keys, without those that ComfyUI leaves out; `uuid` is its name for
    them.

    `shape_of` gives the shape of a weight that nothing has changed. `hook_weights`: weights that go with them
    (block_hooks.py). Raises `ValueError` for what cannot travel, naming the weight.
    """
    if not patches and not hook_weights:
        return WeightDeltas()
    if patches:
        refuse_off("loras")
    changes = tuple(delta for delta, fits in _with_fit(patches, shape_of) if fits and not delta.changes_nothing)
    modules = sorted({each.key.partition("/")[0] for each in hook_weights})
    return WeightDeltas(" ".join([str(uuid), *modules]), (*changes, *hook_weights), side_branch)


def refuse_misfit(patches: Mapping[str, Sequence[tuple]], before: Mapping[str, int], shape_of: ShapeOf) -> str:
    """What ComfyUI leaves out of the patches behind the first `before` of each weight, as they fit no weight of this
    model: some of a LoRA's, as its first layer's where the model has another. "" for nothing; `ValueError` for all
    of several: packs add a LoRA weight by weight, too.
    """
    if patches:
        refuse_off("loras")
    new, left_out = 0, list[WeightDelta]()
    for key, entries in patches.items():
        added = list(_with_fit({key: entries}, shape_of))[before.get(key, 0) :]
        new += len(added)
        left_out += [delta for delta, fits in added if not fits]
    if not left_out:
        return ""
    first = left_out[0]
    if len(left_out) == new > 1:
        raise misfit(first.key, [first], list(shape_of(PREFIX + first.key) or ()))
    return (
        f"{len(left_out)} of {new} changes of weights do not fit this model and are left out, as in ComfyUI; the first "
        f"is of {first.key}"
    )


def attention_left_out(kernels: Iterable[str]) -> str:
    """What is said of a LoRA that asks for these attention functions; "" for none."""
    names = ", ".join(sorted(kernels))
    return f"attention by {names}, which the LoRA asks for, is left out: workers attend as without it" if names else ""


def _with_fit(patches: Mapping[str, Sequence[tuple]], shape_of: ShapeOf) -> Iterator[tuple[WeightDelta, bool]]:
    """Each patch, and whether it fits the weight that those before it make."""
    for key, entries in patches.items():
        shape = shape_of(key)
        for entry in entries:
            delta = _patch(key, entry)
            fits = shape is None or _fits(key, entry, delta, tuple(shape))
            if fits and shape is not None:
                shape = delta.new_shape or shape
            yield delta, fits


def _fits(key: str, entry: tuple, delta: WeightDelta, shape: tuple[int, ...]) -> bool:
    """Whether ComfyUI merges a patch into a weight of this shape without a complaint. It leaves out what does not fit.

    Of an adapter (LoRA and its relatives) its function is tried once, without values. What cannot be tried so, what
    raises, and a strength of the model, which stays where the change does not, are left to the ranks.
    """
    _, change, strength_model, offset, function = entry
    if strength_model != 1.0 or delta.kind in ("set", "padded_diff"):
        return True
    if delta.kind == "diff":
        (tensor,), part = delta.values, list(shape)
        if offset is not None:
            part[offset[0] : offset[0] + 1] = [offset[2]]
        return not isinstance(tensor, torch.Tensor) or list(tensor.shape) == part
    tried, asked = _TRIED.setdefault(change, {}), (shape, offset, function is None)
    if asked not in tried:
        values = (each.to("meta") if isinstance(each, torch.Tensor) else each for each in change.weights)
        bare = (1.0, type(change)(change.loaded_keys, tuple(values)), 1.0, offset, function)
        with complaints() as said, suppress(Exception):
            comfy.lora.calculate_weight([bare], torch.empty(shape, device="meta"), key)
        tried[asked] = not said or any("meta" in each for each in said)
    return tried[asked]


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
        where_used=_merges_where_used(),
    )


def _merges_where_used() -> bool:
    """Whether this ComfyUI has dynamic VRAM on, by which weights are changed anew where a layer is used."""
    return bool(comfy.memory_management.aimdo_enabled)


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
