"""Krea 2 with 5 heads of 128 in one group: from a text, and with a reference as tokens of timestep zero."""

from __future__ import annotations

from host.client import Workflow

from .files import ModelFile, Rule
from .graphs import at_timestep_zero, encoder, picture_of, with_references
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


text_to_image = picture_of(LAYERS * TEXT)


def edit(graph: Workflow) -> None:
    """A picture of 6 tokens as a reference of both prompts, at a timestep of zero."""
    text_to_image(graph)
    encoder(graph)
    with_references(graph, (48, 32))
    at_timestep_zero(graph)


VARIANTS = (
    Variant(name="krea 2", family=FAMILY, file=FILE, add=text_to_image),
    Variant(name="krea 2 edit", family=FAMILY, file=FILE, add=edit),
)
