"""Lumina 2, and Z-Image with and without references (Omni).

ComfyUI's detection fixes their widths, at 24 heads of 96 in 8 groups and at 30 heads of 128, and two blocks in each
refiner, so the files are of 0.9 and 1.8 GB in bf16 with one layer.
"""

from __future__ import annotations

import torch

from host.client import Workflow

from .files import ModelFile
from .graphs import HEIGHT, WIDTH, encoder, node, picture, prompts, second_text, through
from .variant import Variant

LUMINA, Z_IMAGE = "Lumina 2", "Z-Image"
TEXT = 48
CLASS = "comfy.ldm.lumina.model.NextDiT"
COMMON = {"patch_size": 2, "in_channels": 16, "cap_feat_dim": TEXT, "n_layers": 1, "qk_norm": True}
LUMINA_SIZES = {"dim": 2304, "n_heads": 24, "n_kv_heads": 8, "axes_dims": [32, 32, 32], "axes_lens": [300, 512, 512]}
Z_IMAGE_SIZES = {"dim": 3840, "n_heads": 30, "n_kv_heads": 30, "axes_dims": [32, 48, 48], "axes_lens": [1536, 512, 512]}
Z_IMAGE_SIZES |= {"rope_theta": 256.0, "ffn_dim_multiplier": 8 / 3, "z_image_modulation": True, "time_scale": 1000.0}
Z_IMAGE_SIZES |= {"pad_tokens_multiple": 32}
FILES = tuple(
    ModelFile(
        name=f"tiny_{name}.safetensors",
        class_path=CLASS,
        arguments=COMMON | sizes,
        seed=seed,
        dtype=torch.bfloat16,
        only_when_full=True,
    )
    for name, sizes, seed in (("lumina_2", LUMINA_SIZES, 85), ("z_image", Z_IMAGE_SIZES, 86))
)


def text_to_image(graph: Workflow) -> None:
    """35 tokens of picture, which Z-Image fills up to 64; prompts of unequal length."""
    prompts(graph, width=TEXT, tokens=11, negative_tokens=7)
    through(graph, "latent", "EmptySD3LatentImage", "latent_image", width=WIDTH, height=HEIGHT, batch_size=1)


def omni(graph: Workflow) -> None:
    """A picture of 6 tokens as a reference of both prompts, with a text before it and one behind it."""
    text_to_image(graph)
    reference = picture(graph, "picture", width=48, height=32)
    graph["reference"] = node("VAEEncode", pixels=reference, vae=encoder(graph, temporal=0))
    second_text(graph, "reference_latents_text_embeds", tokens=5, width=TEXT, count=2)
    for name in ("positive", "negative"):
        inputs = {"conditioning": [f"{name} second", 0], "latent": ["reference", 0]}
        through(graph, f"{name} edit", "ReferenceLatent", name, **inputs)


VARIANTS = tuple(
    Variant(name=name, family=family, file=f"tiny_{file}.safetensors", add=add)
    for name, family, file, add in (
        ("lumina 2", LUMINA, "lumina_2", text_to_image),
        ("z-image", Z_IMAGE, "z_image", text_to_image),
        ("z-image omni", Z_IMAGE, "z_image", omni),
    )
)
