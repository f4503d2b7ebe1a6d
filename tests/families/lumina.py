"""Lumina 2, and Z-Image with and without references (Omni).

ComfyUI's detection fixes their widths, at 24 heads of 96 in 8 groups and at 30 heads of 128, and two blocks in each
refiner, so the files are of 0.9 and 1.8 GB in bf16 with one layer.
"""

from __future__ import annotations

import torch

from host.client import Workflow

from .files import ModelFile
from .graphs import encoder, picture_of, second_text, with_references
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


text_to_image = picture_of(TEXT)  # Z-Image fills its tokens up to 64


def omni(graph: Workflow) -> None:
    """A picture of 6 tokens as a reference of both prompts, with a text before it and one behind it."""
    text_to_image(graph)
    encoder(graph, temporal=0)
    second_text(graph, "reference_latents_text_embeds", tokens=5, width=TEXT, count=2)
    with_references(graph, (48, 32))


VARIANTS = tuple(
    Variant(name=name, family=family, file=f"tiny_{file}.safetensors", add=add)
    for name, family, file, add in (
        ("lumina 2", LUMINA, "lumina_2", text_to_image),
        ("z-image", Z_IMAGE, "z_image", text_to_image),
        ("z-image omni", Z_IMAGE, "z_image", omni),
    )
)
