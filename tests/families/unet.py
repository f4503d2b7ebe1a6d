"""Stable Diffusion 1.5 with one level of its U-Net: a file whose class has no plan, and its graph."""

from __future__ import annotations

from host.client import Workflow

from .files import ModelFile
from .graphs import HEIGHT, WIDTH, prompts, through
from .variant import Variant

TEXT = 768  # ComfyUI knows the model by it, and by the 320 channels
SIZES = {"image_size": 32, "in_channels": 4, "out_channels": 4, "model_channels": 320, "num_res_blocks": [1]}
SIZES |= {"channel_mult": [1], "transformer_depth": [1], "transformer_depth_output": [1, 1], "num_heads": 8}
SIZES |= {"transformer_depth_middle": 1, "context_dim": TEXT, "use_spatial_transformer": True, "legacy": False}

SD15_FILE = ModelFile(
    name="tiny_sd15.safetensors",
    class_path="comfy.ldm.modules.diffusionmodules.openaimodel.UNetModel",
    arguments=SIZES,
    seed=95,
)


def text_to_image(graph: Workflow) -> None:
    """A latent of 10 x 14; prompts of unequal length."""
    prompts(graph, width=TEXT, tokens=11, negative_tokens=7)
    through(graph, "latent", "EmptyLatentImage", "latent_image", width=WIDTH, height=HEIGHT, batch_size=1)


SD15 = Variant(name="sd 1.5", family="Stable Diffusion 1.5", file=SD15_FILE.name, add=text_to_image)
