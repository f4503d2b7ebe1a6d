"""The weights of a parallel model's own layers, for code that copies some before a run: SD3.5's ControlNets do.

The layers are on the meta device here. While a run with a ControlNet goes on, `state_dict` of any of them gives what
stock ComfyUI's would: the values of the mapped file in the dtype of the class, with the MODEL's LoRAs merged by
ComfyUI's own function. Does not own which ControlNets compute with our layers instead (refusals.py).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from typing import Any

import torch

from ....parallel_runtime.models.hosted.build import Recognised
from ..contract.comfyui import comfy
from ..contract.refusals import have_controlnet, refuse_by
from ..contract.writers import appliers_of_controlnets

PREFIX = "diffusion_model."  # of the names of weights in ComfyUI's patches
MARKS = ("comfy_quant", "weight_scale", "scale_weight")  # stored with the weight of a quantised layer


class OwnWeights:
    """The weights of a file as ComfyUI's class names them, changed by `patches`, ComfyUI's of a MODEL."""

    def __init__(self, recognised: Recognised, patches: Mapping[str, Sequence[tuple]]) -> None:
        self._recognised, self._patches = recognised, patches

    @cached_property
    def _stored(self) -> Mapping[str, torch.Tensor]:
        renamed = getattr(self._recognised.config, "process_unet_state_dict", dict)
        named: Mapping[str, torch.Tensor] = renamed(dict(self._recognised.weights))
        return named

    def fill(
        self, path: str, module: torch.nn.Module, state: dict[str, torch.Tensor], prefix: str, metadata: object
    ) -> None:
        """Put values into the `state` that torch collects, for the module at this path of the transformer.

        A hook of `Module.state_dict`, by which the module's own weights are named `prefix` and their own names. Raises
        `ValueError` for a weight that has no values of its own in the file.
        """
        for name, weight in module.named_parameters(recurse=False):
            if weight.is_meta:
                state[f"{prefix}{name}"] = self._value(f"{path}.{name}" if path else name, weight.dtype)

    def _value(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        owner, _, _ = name.rpartition(".")
        stored = self._stored.get(name)
        if stored is None or any(f"{owner}.{mark}" in self._stored for mark in MARKS):
            there = "is not in the model's file" if stored is None else "is quantised in the model's file"
            what = f"its ControlNet copies a weight of the model, {name}, that {there}"
            raise refuse_by(appliers_of_controlnets(), what, "use a file of the model in bf16 or fp16")
        value = stored.to(self._recognised.dtypes_kept.get(name, dtype))
        return self._patched(name, value) if f"{PREFIX}{name}" in self._patches else value

    def _patched(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """With the MODEL's patches, computed where and rounded as ComfyUI does when it loads a MODEL."""
        *owners, last = f"{PREFIX}{name}".split(".")
        holder = inner = torch.nn.Module()
        for each in owners:
            inner.add_module(each, torch.nn.Module())
            inner = inner.get_submodule(each)
        inner.register_parameter(last, torch.nn.Parameter(value, requires_grad=False))
        device = comfy.model_management.get_torch_device()
        patcher = comfy.model_patcher.ModelPatcher(holder, device, value.device)
        patcher.patches = {f"{PREFIX}{name}": list(self._patches[f"{PREFIX}{name}"])}
        patcher.patch_weight_to_device(f"{PREFIX}{name}", device_to=device)
        return inner.get_parameter(last).detach().to(value.device)


@contextmanager
def readable_weights(model: Any, patches: Mapping[str, Sequence[tuple]], conds: Mapping[str, Any]) -> Iterator[None]:  # noqa: ANN401
    """Have the layers of a parallel `model` give the file's values for the block, if `conds` have a ControlNet."""
    recognised = model.prover.recognised
    with ExitStack() as hooks:
        if have_controlnet(conds):
            own = OwnWeights(recognised, patches)
            for path, module in model.diffusion_model.named_modules():
                hooks.callback(module.register_state_dict_post_hook(partial(own.fill, path)).remove)
        yield
