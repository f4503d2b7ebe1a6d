"""ControlNets of few layers and random weights: ComfyUI's own classes, in the form that its loaders give them."""

from typing import Any

import comfy.controlnet
import comfy.latent_formats
import comfy.ops
import torch
from comfy.ldm.lumina.controlnet import ZImage_Control
from comfy.ldm.qwen_image.controlnet import QwenImageControlNetModel
from comfy.model_patcher import ModelPatcher
from comfy_api.latest import io
from comfy_extras.nodes_model_patch import QwenImageBlockWiseControlNet

from .node import node


def random_module(kind: Any, *, dtype: torch.dtype, **sizes: Any) -> torch.nn.Module:
    """A module of ComfyUI's on the CPU, its values of the order of 1."""
    made = kind(**sizes, device=torch.device("cpu"), dtype=dtype, operations=comfy.ops.manual_cast).to(dtype)
    numbers = torch.Generator().manual_seed(3)
    for weight in made.parameters():
        scale = 1 / weight.shape[-1] ** 0.5 if weight.ndim > 1 else 0.1
        weight.data.normal_(1.0 if weight.ndim == 1 else 0.0, scale, generator=numbers)
    return made.requires_grad_(False)


FAMILIES = {
    "small qwen-image": (QwenImageBlockWiseControlNet, {"num_layers": 2, "dim": 80}),
    "small z-image": (ZImage_Control, {"n_control_layers": 1, "dim": 288, "n_heads": 6, "n_kv_heads": 6}),
}


@node("RandomModelPatch", family=list(FAMILIES), gives=[io.Custom("MODEL_PATCH")])
def random_model_patch(family: str) -> io.NodeOutput:
    """What ModelPatchLoader gives for the ControlNets of Qwen-Image and Z-Image: stock's classes, of few layers."""
    cpu, (kind, sizes) = torch.device("cpu"), FAMILIES[family]
    net = random_module(kind, dtype=torch.bfloat16, **sizes)
    return io.NodeOutput(ModelPatcher(net, load_device=cpu, offload_device=cpu))


SIZES = {"num_layers": 1, "num_attention_heads": 5, "attention_head_dim": 16, "joint_attention_dim": 48}


@node("RandomInpaintingControlNet", gives=[io.ControlNet])
def random_inpainting_control_net(mask: bool = True) -> io.NodeOutput:
    """What ControlNetLoader gives for InstantX's ControlNets of Qwen-Image: the inpainting one takes a mask as well."""
    sizes = {**SIZES, "axes_dims_rope": (4, 6, 6), "extra_condition_channels": 4 if mask else 0}
    net = random_module(QwenImageControlNetModel, dtype=torch.float32, **sizes)
    given = {"latent_format": comfy.latent_formats.Wan21(), "concat_mask": mask, "extra_conds": []}
    where = torch.device("cpu")
    return io.NodeOutput(comfy.controlnet.ControlNet(net, compression_ratio=1, load_device=where, **given))
