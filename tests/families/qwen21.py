"""Qwen-Image 2.1: from a text, and an edit with a reference of as many tokens as the picture has."""

from host.client import Workflow

from .files import Rule, tiny
from .graphs import encoder, picture, prompts, through, with_references
from .variant import variants

FAMILY, FILE = "Qwen-Image 2.1", "tiny_qwen_image_2.1.safetensors"
CHANNELS, PIXELS, TEXT = 64, 16, 48  # of a latent, of one of its rows and columns; numbers of a token of text
WIDTH, HEIGHT = 7 * PIXELS, 5 * PIXELS  # 35 tokens, which neither 2 nor 3 divides
SIZES = {"in_channels": CHANNELS, "out_channels": CHANNELS, "num_layers": 2, "attention_head_dim": 128}
SIZES |= {"num_attention_heads": 5, "context_in_dim": TEXT, "mlp_ratio": 2}
RULES = (Rule(r"text_norm\.weight$", std=0.1), Rule(r"modulation\.1\.weight$", gain=1.0))
FILES = (tiny("qwen_image_2.1", "qwen_image21.model.QwenImage21Transformer2DModel", 92, SIZES, rules=RULES),)


def text_to_image(graph: Workflow) -> None:
    """35 tokens of picture; prompts of unequal length."""
    prompts(graph, width=TEXT, tokens=11, negative_tokens=7)
    vae = encoder(graph, channels=CHANNELS, spatial=PIXELS, temporal=0)
    pixels = picture(graph, "start", width=WIDTH, height=HEIGHT)
    through(graph, "latent", "VAEEncode", "latent_image", pixels=pixels, vae=vae)


def edit(graph: Workflow) -> None:
    """A reference of 35 tokens behind both prompts."""
    text_to_image(graph)
    with_references(graph, (WIDTH, HEIGHT))


VARIANTS = variants(
    ("qwen-image 2.1", FAMILY, "qwen_image_2.1", text_to_image), ("qwen-image 2.1 edit", FAMILY, "qwen_image_2.1", edit)
)
