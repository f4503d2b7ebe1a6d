"""Qwen-Image and Qwen-Image-Edit: one file, graphs with and without reference latents.

ComfyUI's detection fixes the width at 24 heads of 128 and the text at 3584, so the file is 1.5 GB in bf16 with two
blocks; with one, an error of the text's stream would not reach the picture.
"""

from __future__ import annotations

import torch

from host.client import Workflow

from .files import ModelFile
from .graphs import HEIGHT, WIDTH, encoder, node, picture, prompts, through
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


def text_to_image(graph: Workflow) -> None:
    """An empty latent and two prompts of unequal length."""
    prompts(graph, width=3584, tokens=11, negative_tokens=7)
    through(graph, "latent", "EmptySD3LatentImage", "latent_image", width=WIDTH, height=HEIGHT, batch_size=1)


def edit(graph: Workflow) -> None:
    """One picture to edit, of another size, as a reference latent of both prompts."""
    text_to_image(graph)
    graph["reference"] = node("VAEEncode", pixels=picture(graph, "picture", width=48, height=32), vae=encoder(graph))
    for name in ("positive", "negative"):
        inputs = {"conditioning": [name, 0], "latent": ["reference", 0]}
        through(graph, f"edit {name}", "ReferenceLatent", name, **inputs)


def edit_at_timestep_zero(graph: Workflow) -> None:
    """The method of Qwen-Image-Edit 2511: references are modulated by a timestep of 0."""
    edit(graph)
    for name in ("positive", "negative"):
        inputs = {"conditioning": [f"edit {name}", 0], "reference_latents_method": "index_timestep_zero"}
        through(graph, f"method {name}", "FluxKontextMultiReferenceLatentMethod", name, **inputs)


VARIANTS = (
    Variant(name="qwen-image", family=FAMILY, file=FILE, add=text_to_image),
    Variant(name="qwen-image-edit", family=FAMILY, file=FILE, add=edit),
    Variant(name="qwen-image-edit, timestep zero", family=FAMILY, file=FILE, add=edit_at_timestep_zero),
)
