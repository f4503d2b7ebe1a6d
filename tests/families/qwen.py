"""Qwen-Image and Qwen-Image-Edit: one file, graphs with and without reference latents.

ComfyUI's detection fixes the width at 24 heads of 128 and the text at 3584, so the file is 1.5 GB in bf16 with two
blocks; with one, an error of the text's stream would not reach the picture.
"""

from __future__ import annotations

import torch

from host.client import Workflow

from .files import ModelFile
from .graphs import at_timestep_zero, encoder, picture_of, with_references
from .variant import Variant

FAMILY = "Qwen-Image"
FILE = "tiny_qwen_image.safetensors"
FILES = (
    ModelFile(
        name=FILE,
        class_path="comfy.ldm.qwen_image.model.QwenImageTransformer2DModel",
        arguments={"num_layers": 2},
        seed=30,
        dtype=torch.bfloat16,
        only_when_full=True,
    ),
)


text_to_image = picture_of(3584)


def edit(graph: Workflow) -> None:
    """One picture to edit, of another size, as a reference latent of both prompts."""
    text_to_image(graph)
    encoder(graph)
    with_references(graph, (48, 32))


def edit_at_timestep_zero(graph: Workflow) -> None:
    edit(graph)
    at_timestep_zero(graph)


VARIANTS = (
    Variant(name="qwen-image", family=FAMILY, file=FILE, add=text_to_image),
    Variant(name="qwen-image-edit", family=FAMILY, file=FILE, add=edit),
    Variant(name="qwen-image-edit, timestep zero", family=FAMILY, file=FILE, add=edit_at_timestep_zero),
)
