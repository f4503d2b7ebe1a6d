"""Krea 2 with 5 heads of 128 in one group: from a text, and with a reference as tokens of timestep zero."""

from __future__ import annotations

from host.client import Workflow

from .files import ModelFile, Rule
from .graphs import HEIGHT, WIDTH, encoder, node, picture, prompts, through
from .variant import Variant

FAMILY, FILE = "Krea 2", "tiny_krea_2.safetensors"
LAYERS, TEXT = 3, 80  # of the text encoder that the conditioning holds, and their width: 20 heads
SIZES = {"features": 640, "channels": 16, "patch": 2, "layers": 2, "heads": 5, "kvheads": 1}
FILES = (
    ModelFile(
        name=FILE,
        class_path="comfy.ldm.krea2.model.SingleStreamDiT",
        arguments=SIZES | {"txtlayers": LAYERS, "txtdim": TEXT},
        rules=(Rule(r"[qk]norm\.scale$", std=0.1, mean=0.5), Rule(r"\.scale$", std=0.1)),  # a norm's is 1 + scale
        seed=87,
    ),
)


def text_to_image(graph: Workflow) -> None:
    """35 tokens of picture; prompts of unequal length."""
    prompts(graph, width=LAYERS * TEXT, tokens=11, negative_tokens=7)
    through(graph, "latent", "EmptySD3LatentImage", "latent_image", width=WIDTH, height=HEIGHT, batch_size=1)


def edit(graph: Workflow) -> None:
    """A picture of 6 tokens as a reference of both prompts, at a timestep of zero."""
    text_to_image(graph)
    graph["reference"] = node("VAEEncode", pixels=picture(graph, "picture", width=48, height=32), vae=encoder(graph))
    for name in ("positive", "negative"):
        inputs = {"conditioning": [name, 0], "latent": ["reference", 0]}
        through(graph, f"edit {name}", "ReferenceLatent", name, **inputs)
        inputs = {"conditioning": [f"edit {name}", 0], "reference_latents_method": "index_timestep_zero"}
        through(graph, f"method {name}", "FluxKontextMultiReferenceLatentMethod", name, **inputs)


VARIANTS = (
    Variant(name="krea 2", family=FAMILY, file=FILE, add=text_to_image),
    Variant(name="krea 2 edit", family=FAMILY, file=FILE, add=edit),
)
