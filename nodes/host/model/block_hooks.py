"""Patches that stock nodes put between a model's blocks, read so that ranks can rebuild them (hosted/block_hooks.py).

Owns which patches are taken and what of them travels: the weights once, with the MODEL's weight patches; strength and
encoded picture with each call. Does not own the refusal of all others (refusals.py).
"""

import copy
import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from ....parallel_runtime.models.hosted.block_hooks import EXTRAS, PICTURES, REBUILT, config_of
from ....parallel_runtime.weight_delta import HOOK_WEIGHT, WeightDelta

FILE = EXTRAS.rpartition(".")[2] + ".py"
LEFT_OUT = (*PICTURES, "temp_data", "model_patch", "vae")


def is_rebuilt(patch: object) -> bool:
    """Whether ranks rebuild this patch: stock's own class, not one of its name or derived from it."""
    kind = type(patch)
    if kind.__name__ not in REBUILT or kind.__bases__ != (object,):
        return False
    place = inspect.getsourcefile(kind) or ""
    return os.path.basename(place) == FILE and os.path.basename(os.path.dirname(place)) == "comfy_extras"


def hook_weights(options: Mapping[str, Any]) -> tuple[WeightDelta, ...]:
    """The weights of the modules that patches in these options use, each module's once."""
    found = {}
    for patch, _ in _taken(options):
        number, module = _number(patch), patch.model_patch.model
        for name, weight in module.state_dict().items():
            key = f"{number}/{name}"
            found[key] = WeightDelta(key=key, kind=HOOK_WEIGHT, strength=1.0, values=(weight,))
    return tuple(found.values())


def hook_models(options: Mapping[str, Any]) -> list[Any]:
    """ComfyUI's handles on the modules that such patches use."""
    return [patch.model_patch for patch, _ in _taken(options)]


def records(options: Mapping[str, Any], transformer: torch.nn.Module, x: Any) -> list[dict[str, Any]]:  # noqa: ANN401
    """What a call of the latent `x` tells the ranks of each patch in its options.

    A picture that was encoded for another size is encoded anew, by the patch's own code. Raises `ValueError` for a
    patch of another model's blocks, and for more pictures than one.
    """
    return [_record(patch, kinds, transformer, x.shape) for patch, kinds in _taken(options)]


def _record(patch: Any, kinds: list[str], transformer: torch.nn.Module, shape: Sequence[int]) -> dict[str, Any]:  # noqa: ANN401
    name = type(patch).__name__
    meant = REBUILT[name]
    classes = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(transformer).__mro__]
    if meant.transformer not in classes:
        raise ValueError(
            f"{name} is made for {meant.transformer.rpartition('.')[2]}, and this MODEL is a "
            f"{type(transformer).__name__}; remove the node that adds it, or use the model that it is made for"
        )
    height, width = ((side + side % 2) if meant.pads else side for side in shape[-2:])
    _encode_for(patch, torch.empty((1, 1, height, width), device="meta"))
    pictures = patch.encoded_image.shape[0]
    if pictures > 1:
        raise ValueError(f"the control image of {name} has {pictures} pictures; use one")
    state = {key: value for key, value in vars(patch).items() if key not in LEFT_OUT}
    return {
        "patch": name,
        "kinds": kinds,
        "module": _number(patch),
        "config": config_of(patch.model_patch.model),
        "state": state,
        "compression": patch.vae.spacial_compression_encode(),
    }


class _EncodedError(Exception):
    """Said in place of what would compute; no error of anybody's."""


class _EncodesAlone:
    """A patch's module, of which only what encodes a picture runs here."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._module, name)

    def __call__(self, *_: object) -> None:
        raise _EncodedError

    def control_block(self, *_: object) -> None:
        raise _EncodedError


def _encode_for(patch: Any, x: torch.Tensor) -> None:  # noqa: ANN401
    """Have the patch's picture encoded for a latent of the shape of `x`, as its own first call would."""
    mine = copy.copy(patch)
    mine.model_patch, mine.temp_data = SimpleNamespace(model=_EncodesAlone(patch.model_patch.model)), None
    given = dict.fromkeys(("img_input", "txt", "pe", "vec"))
    try:
        mine({"x": x, "img": torch.zeros(1, 1, 1), "block_index": 0, "block_type": "double_block", **given})
    except _EncodedError:
        pass
    patch.encoded_image, patch.encoded_image_size = mine.encoded_image, mine.encoded_image_size


def _taken(options: Mapping[str, Any]) -> Iterator[tuple[Any, list[str]]]:
    """Each patch in the options once, with the kinds that it stands under."""
    kinds: dict[int, tuple[Any, list[str]]] = {}
    for kind, patches in options.get("patches", {}).items():
        for patch in patches:
            if is_rebuilt(patch):
                kinds.setdefault(id(patch), (patch, []))[1].append(kind)
    yield from kinds.values()


def _number(patch: Any) -> int:  # noqa: ANN401
    """A name for the weights that the patch uses: their patcher's own, made when they were loaded."""
    return int(patch.model_patch.patches_uuid.int % 2**52)
