"""Flux.1 with 3 heads, from a text and with a reference (Kontext), Flux.2 (dev, klein), and Chroma.

The files of Flux.1 are those that tests/host writes, by its own layouts.
"""

from host import layouts
from host.client import Workflow

from .files import Rule, large, tiny
from .graphs import encoder, picture_of, through, with_references
from .variant import variants

FAMILY, FAMILY_2, CHROMA = "Flux.1", "Flux.2", "Chroma"
SHAPE = layouts.FluxShape(hidden=384, depth=1, single=2)
# Flux.2 has no bias, heads of 128 as 4 axes of 32, an MLP of 3 times the width, one modulation for all blocks.
FLUX_2 = {"hidden_size": 384, "num_heads": 3, "axes_dim": [32, 32, 32, 32], "depth": 1, "depth_single_blocks": 2}
FLUX_2 |= {"in_channels": 128, "out_channels": 128, "context_in_dim": 48, "vec_in_dim": None, "mlp_ratio": 3.0}
FLUX_2 |= {"theta": 2000, "patch_size": 1, "qkv_bias": False, "guidance_embed": True, "txt_ids_dims": [3]}
FLUX_2 |= {"global_modulation": True, "mlp_silu_act": True, "ops_bias": False}
MODULATIONS = Rule(r"modulation_\w+\.lin\.weight$|adaLN", gain=1.0)
# Its detection fixes 24 heads and the five layers that make all modulations, so the file is of 1.2 GB in bf16.
CHROMA_SIZES = {"hidden_size": 3072, "num_heads": 24, "axes_dim": [16, 56, 56], "depth": 1, "depth_single_blocks": 1}
CHROMA_SIZES |= {"in_channels": 64, "out_channels": 64, "context_in_dim": 48, "vec_in_dim": None, "mlp_ratio": 4.0}
CHROMA_SIZES |= {"theta": 10000, "patch_size": 2, "qkv_bias": True, "txt_ids_dims": [], "in_dim": 64}
CHROMA_SIZES |= {"out_dim": 3072, "hidden_dim": 5120, "n_layers": 5}
FILES = (
    tiny("flux_1", "flux.model.Flux", 60, {}, layout=tuple(layouts.flux(SHAPE))),
    tiny("flux_2", "flux.model.Flux", 61, FLUX_2, rules=(MODULATIONS,)),
    tiny("flux_2_klein", "flux.model.Flux", 62, FLUX_2 | {"guidance_embed": False}, rules=(MODULATIONS,)),
    large("chroma", "chroma.model.Chroma", 63, CHROMA_SIZES),
)


def text_to_image(graph: Workflow) -> None:
    """35 tokens of picture; prompts of unequal length, with guidance."""
    picture_of(SHAPE.ctx, pooled=SHAPE.vec)(graph)
    through(graph, "guidance", "FluxGuidance", "positive", conditioning=["positive", 0], guidance=3.5)


def kontext(graph: Workflow) -> None:
    """A picture of 6 tokens as a reference of both prompts."""
    text_to_image(graph)
    encoder(graph, temporal=0)
    with_references(graph, (48, 32))


def flux_2(graph: Workflow) -> None:
    """5 x 7 latent pixels of 16 pixels a side, a token each."""
    picture_of(FLUX_2["context_in_dim"], "EmptyFlux2LatentImage")(graph)
    through(graph, "guidance", "FluxGuidance", "positive", conditioning=["positive", 0], guidance=3.5)


def flux_2_edit(graph: Workflow) -> None:
    """A picture of 6 tokens as a reference of both prompts."""
    flux_2(graph)
    encoder(graph, channels=128, spatial=16, temporal=0)
    with_references(graph, (48, 32))


VARIANTS = variants(
    ("flux.1 t2i", FAMILY, "flux_1", text_to_image),
    ("flux.1 kontext", FAMILY, "flux_1", kontext),
    ("flux.2 t2i", FAMILY_2, "flux_2", flux_2),
    ("flux.2 edit", FAMILY_2, "flux_2", flux_2_edit),
    ("flux.2 klein", FAMILY_2, "flux_2_klein", flux_2_edit),
    ("chroma", CHROMA, "chroma", picture_of(48)),
)
