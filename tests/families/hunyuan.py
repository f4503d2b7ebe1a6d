"""HunyuanVideo with 5 heads: from a text with padding, and with a first frame as tokens of timestep zero."""

from __future__ import annotations

from host.client import Workflow

from .files import ModelFile
from .graphs import HEIGHT, LENGTH, WIDTH, encoder, picture, prompts, through
from .variant import Variant

FAMILY = "HunyuanVideo"
TEXT, POOLED = 48, 768  # the pooled text's width is fixed by ComfyUI's detection, as are heads of 128
SIZES = {"in_channels": 16, "out_channels": 16, "vec_in_dim": POOLED, "context_in_dim": TEXT, "hidden_size": 640}
SIZES |= {"mlp_ratio": 4.0, "num_heads": 5, "depth": 1, "depth_single_blocks": 2, "axes_dim": [16, 56, 56]}
SIZES |= {"theta": 256, "patch_size": [1, 2, 2], "qkv_bias": True, "guidance_embed": True, "byt5": False}
SIZES |= {"meanflow": False, "use_cond_type_embedding": False, "vision_in_dim": None, "meanflow_sum": False}
FILES = (
    ModelFile(
        name="tiny_hunyuan_video.safetensors",
        class_path="comfy.ldm.hunyuan_video.model.HunyuanVideo",
        arguments=SIZES,
        seed=70,
    ),
)
SIZE = {"width": WIDTH, "height": HEIGHT, "length": LENGTH, "batch_size": 1}


def text_to_video(graph: Workflow) -> None:
    """175 tokens of video, 11 of text, of which two are padding that attention leaves out.

    The negative is shorter: stock ComfyUI cannot run both in one batch where there is a mask.
    """
    prompts(graph, width=TEXT, tokens=11, negative_tokens=7, pooled=POOLED, masked=2)
    through(graph, "latent", "EmptyHunyuanLatentVideo", "latent_image", **SIZE)
    through(graph, "guidance", "FluxGuidance", "positive", conditioning=["positive", 0], guidance=6.0)


def image_to_video(graph: Workflow) -> None:
    """The first frame is given: its tokens have a timestep of zero."""
    text_to_video(graph)
    inputs = {"positive": ["guidance", 0], "vae": encoder(graph), "guidance_type": "v2 (replace)"}
    inputs |= {"start_image": picture(graph, "picture"), **SIZE}
    through(graph, "video", "HunyuanImageToVideo", "positive", "latent_image", **inputs)


VARIANTS = tuple(
    Variant(name=name, family=FAMILY, file="tiny_hunyuan_video.safetensors", add=add)
    for name, add in (("hunyuanvideo t2v", text_to_video), ("hunyuanvideo i2v", image_to_video))
)
