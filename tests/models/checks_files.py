"""What is read from files of U-Nets: under other names, and as a checkpoint, which says more of its model.

Run with those of quantised_checks.py, in a process that has imported ComfyUI's detection.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from families.unet import KOALA, SDXL
from parallel_runtime.models.hosted.build import META, recognise
from parallel_runtime.parallel.collectives import Axis

from .quantised_checks import check


def names_of(arguments: dict[str, Any]) -> dict[str, Tensor]:
    """The weights of a U-Net of such arguments, by name, without values."""
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

    made = UNetModel(**arguments, out_channels=4, device="meta")
    return dict(made.state_dict())


@check
def a_checkpoint_says_what_its_model_predicts_and_its_transformer_does_not(axis: Axis) -> None:
    """As ComfyUI's two loaders: of SDXL, Load Diffusion Model never learns that a checkpoint predicts v."""
    whole = {f"model.diffusion_model.{name}": weight for name, weight in names_of(KOALA).items()}
    whole |= {"first_stage_model.encoder.conv_in.weight": torch.zeros(1), "v_pred": torch.zeros(0)}
    for checkpoint, predicts in ((True, "V_PREDICTION"), (False, "EPS")):
        found = recognise("x.safetensors", whole, {}, checkpoint=checkpoint)
        assert found.model(META).model_type.name == predicts
        assert set(found.weights) == {name.removeprefix("model.diffusion_model.") for name in whole if ".diff" in name}


@check
def a_unet_under_diffusers_names_is_read_under_comfyuis(axis: Axis) -> None:
    from comfy.utils import unet_to_diffusers

    depths = {"transformer_depth_output": [0, 0, 0, 2, 2, 2, 10, 10, 10], "transformer_depth_middle": 10}
    arguments = SDXL | depths | {"channel_mult": [1, 2, 4]}
    weights = names_of(arguments)
    names = {ours: theirs for theirs, ours in unet_to_diffusers(arguments).items()}
    found = recognise("x.safetensors", {names[name]: weight for name, weight in weights.items()}, {})
    assert {name: weight.shape for name, weight in found.weights.items()} == {
        name: weight.shape for name, weight in weights.items()
    }
    assert {name for name, _ in found.model(META).diffusion_model.named_parameters()} == set(weights)
