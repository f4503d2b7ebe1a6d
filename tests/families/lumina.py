"""Lumina 2, Z-Image with and without references (Omni); Krea 2 with 5 heads of 128 in one group, with and without one.

ComfyUI's detection fixes the widths of the first two, at 24 heads of 96 in 8 groups and at 30 heads of 128, and two
blocks in each refiner, so the files are of 0.9 and 1.8 GB in bf16 with one layer.
"""

from host.client import Workflow

from .files import Rule, large, tiny
from .graphs import at_timestep_zero, encoder, picture_of, second_text, with_references
from .variant import variants

LUMINA, Z_IMAGE, KREA = "Lumina 2", "Z-Image", "Krea 2"
TEXT = 48
COMMON = {"patch_size": 2, "in_channels": 16, "cap_feat_dim": TEXT, "n_layers": 1, "qk_norm": True}
LUMINA_SIZES = {"dim": 2304, "n_heads": 24, "n_kv_heads": 8, "axes_dims": [32, 32, 32], "axes_lens": [300, 512, 512]}
Z_IMAGE_SIZES = {"dim": 3840, "n_heads": 30, "n_kv_heads": 30, "axes_dims": [32, 48, 48], "axes_lens": [1536, 512, 512]}
Z_IMAGE_SIZES |= {"rope_theta": 256.0, "ffn_dim_multiplier": 8 / 3, "z_image_modulation": True, "time_scale": 1000.0}
Z_IMAGE_SIZES |= {"pad_tokens_multiple": 32}
KREA_TEXT = {"txtlayers": 3, "txtdim": 80}  # layers of the text encoder that the conditioning holds: 20 heads wide
KREA_SIZES = {"features": 640, "channels": 16, "patch": 2, "layers": 2, "heads": 5, "kvheads": 1, **KREA_TEXT}
NORMS = (Rule(r"[qk]norm\.scale$", std=0.1, mean=0.5), Rule(r"\.scale$", std=0.1))  # Krea's norms are 1 + scale
FILES = (
    large("lumina_2", "lumina.model.NextDiT", 85, COMMON | LUMINA_SIZES),
    large("z_image", "lumina.model.NextDiT", 86, COMMON | Z_IMAGE_SIZES),
    tiny("krea_2", "krea2.model.SingleStreamDiT", 87, KREA_SIZES, rules=NORMS),
)
text_to_image = picture_of(TEXT)  # Z-Image fills its tokens up to 64


def omni(graph: Workflow) -> None:
    """A picture of 6 tokens as a reference of both prompts, with a text before it and one behind it."""
    text_to_image(graph)
    encoder(graph, temporal=0)
    second_text(graph, "reference_latents_text_embeds", tokens=5, width=TEXT, count=2)
    with_references(graph, (48, 32))


krea = picture_of(3 * 80)


def krea_edit(graph: Workflow) -> None:
    """A picture of 6 tokens as a reference of both prompts, at a timestep of zero."""
    krea(graph)
    encoder(graph)
    with_references(graph, (48, 32))
    at_timestep_zero(graph)


VARIANTS = variants(
    ("lumina 2", LUMINA, "lumina_2", text_to_image),
    ("z-image", Z_IMAGE, "z_image", text_to_image),
    ("z-image omni", Z_IMAGE, "z_image", omni),
    ("krea 2", KREA, "krea_2", krea),
    ("krea 2 edit", KREA, "krea_2", krea_edit),
)
