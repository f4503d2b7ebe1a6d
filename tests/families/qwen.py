"""Qwen-Image and Qwen-Image-Edit: one file, graphs with and without reference latents.

ComfyUI's detection fixes the width at 24 heads of 128 and the text at 3584, so the file is 1.5 GB in bf16 with two
blocks; with one, an error of the text's stream would not reach the picture.
"""

from host.client import Workflow

from .files import large
from .graphs import at_timestep_zero, encoder, picture_of, with_references
from .variant import variants

FAMILY = "Qwen-Image"
FILES = (large("qwen_image", "qwen_image.model.QwenImageTransformer2DModel", 30, {"num_layers": 2}),)
text_to_image = picture_of(3584)


def edit(graph: Workflow) -> None:
    """One picture to edit, of another size, as a reference latent of both prompts."""
    text_to_image(graph)
    encoder(graph)
    with_references(graph, (48, 32))


def edit_at_timestep_zero(graph: Workflow) -> None:
    edit(graph)
    at_timestep_zero(graph)


VARIANTS = variants(
    ("qwen-image", FAMILY, "qwen_image", text_to_image),
    ("qwen-image-edit", FAMILY, "qwen_image", edit),
    ("qwen-image-edit, timestep zero", FAMILY, "qwen_image", edit_at_timestep_zero),
)
