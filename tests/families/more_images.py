"""Lens with 5 heads, JoyImage with 3 (from a text, and with two references), Kandinsky 5 with 5; Ideogram 4.

ComfyUI's detection fixes the widths of Ideogram 4 at 18 heads of 256, so its file is of 1.1 GB in bf16 with one layer.
"""

from __future__ import annotations

import torch

from host.client import Workflow

from .files import ModelFile, Rule
from .graphs import HEIGHT, LENGTH, WIDTH, encoder, picture, picture_of, prompts, through, with_references
from .variant import Variant

LENS, JOY, KANDINSKY, IDEOGRAM = "Lens", "JoyImage", "Kandinsky 5", "Ideogram 4"
LAYERS, LENS_TEXT = 2, 48  # of the text encoder that Lens's conditioning holds
JOY_TEXT, TEXT, POOLED, LLM = 4096, 3584, 768, 53248  # fixed by ComfyUI's detection
LENS_SIZES = {"in_channels": 128, "out_channels": 32, "num_layers": 2, "num_attention_heads": 5}
LENS_SIZES |= {"enc_hidden_dim": LENS_TEXT, "selected_layer_index": [0, 1]}
JOY_SIZES = {"in_channels": 16, "hidden_size": 384, "num_attention_heads": 3, "num_layers": 2, "text_dim": JOY_TEXT}
KANDINSKY_SIZES = {"model_dim": 320, "in_text_dim": TEXT, "in_text_dim2": POOLED, "time_dim": 64, "ff_dim": 640}
KANDINSKY_SIZES |= {"visual_embed_dim": 132, "num_text_blocks": 1, "num_visual_blocks": 2}
FILES = (
    ModelFile(
        name="tiny_lens.safetensors",
        class_path="comfy.ldm.lens.model.LensTransformer2DModel",
        arguments=LENS_SIZES,
        seed=90,
    ),
    ModelFile(
        name="tiny_joyimage.safetensors",
        class_path="comfy.ldm.joyimage.model.JoyImageTransformer3DModel",
        arguments=JOY_SIZES,
        rules=(Rule(r"modulate_table$", std=0.3, mean=0.5),),
        seed=91,
    ),
    ModelFile(
        name="tiny_kandinsky_5.safetensors",
        class_path="comfy.ldm.kandinsky5.model.Kandinsky5",
        arguments=KANDINSKY_SIZES,
        seed=92,
    ),
    ModelFile(
        name="tiny_ideogram_4.safetensors",
        class_path="comfy.ldm.ideogram4.model.Ideogram4Transformer2DModel",
        arguments={"num_layers": 1},
        seed=93,
        dtype=torch.bfloat16,
        only_when_full=True,
    ),
)


lens = picture_of(LAYERS * LENS_TEXT, "EmptyFlux2LatentImage", masked=2)  # attention leaves the padding out
ideogram = picture_of(LLM, "EmptyFlux2LatentImage", masked=2)  # the padding sees itself alone


def joy_image(graph: Workflow) -> None:
    """35 tokens of picture; prompts of unequal length."""
    prompts(graph, width=JOY_TEXT, tokens=11, negative_tokens=7)
    size = {"width": WIDTH, "height": HEIGHT, "length": 1, "batch_size": 1}
    through(graph, "latent", "EmptyHunyuanLatentVideo", "latent_image", **size)


def joy_image_edit(graph: Workflow) -> None:
    """Pictures of 6 and 4 tokens as references of both prompts."""
    joy_image(graph)
    encoder(graph)
    with_references(graph, (48, 32), (32, 32))


def kandinsky(graph: Workflow) -> None:
    """175 tokens of video; prompts of unequal length."""
    prompts(graph, width=TEXT, tokens=11, negative_tokens=7, pooled=POOLED)
    inputs = {"positive": ["positive", 0], "negative": ["negative", 0], "vae": encoder(graph), "width": WIDTH}
    inputs |= {"height": HEIGHT, "length": LENGTH, "batch_size": 1}
    through(graph, "video", "Kandinsky5ImageToVideo", "positive", "negative", "latent_image", **inputs)


def kandinsky_i2v(graph: Workflow) -> None:
    """The first frame is given."""
    kandinsky(graph)
    graph["video"]["inputs"]["start_image"] = picture(graph, "picture")


VARIANTS = tuple(
    Variant(name=name, family=family, file=f"tiny_{file}.safetensors", add=add)
    for name, family, file, add in (
        ("lens", LENS, "lens", lens),
        ("joyimage", JOY, "joyimage", joy_image),
        ("joyimage edit", JOY, "joyimage", joy_image_edit),
        ("kandinsky 5 t2v", KANDINSKY, "kandinsky_5", kandinsky),
        ("kandinsky 5 i2v", KANDINSKY, "kandinsky_5", kandinsky_i2v),
        ("ideogram 4", IDEOGRAM, "ideogram_4", ideogram),
    )
)
