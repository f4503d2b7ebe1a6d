"""Which tensors the tiny text encoders and the tiny autoencoder hold: names, shapes, initial values.

The vocabularies are the real ones (the tokenizers are); only widths and depths are tiny.
"""

import math

from .layouts import LATENT_CHANNELS, Row, linear

CLIP_VOCABULARY, CLIP_POSITIONS = 49408, 77
T5_VOCABULARY, T5_BUCKETS = 32128, 32
TAESD_WIDTH = 64
PICTURE_GAIN = 0.1  # of the last convolution; found by looking at the pictures


def layer_norm(name: str, width: int) -> list[Row]:
    """A layer norm as trained models start: weight 1, bias 0."""
    return [Row(f"{name}.weight", (width,), 0.0, 1.0), Row(f"{name}.bias", (width,), 0.0)]


def clip_l(width: int, *, layers: int = 2) -> list[Row]:
    """CLIP-L's text model, `width` wide; two layers at least, by whose second ComfyUI tells CLIP-L from T5."""
    rows = [
        Row("text_model.embeddings.token_embedding.weight", (CLIP_VOCABULARY, width), 1.0),
        Row("text_model.embeddings.position_embedding.weight", (CLIP_POSITIONS, width), 1.0),
    ]
    for index in range(layers):
        prefix = f"text_model.encoder.layers.{index}"
        for name in ("q", "k", "v", "out"):
            rows += linear(f"{prefix}.self_attn.{name}_proj", width, width)
        rows += linear(f"{prefix}.mlp.fc1", 2 * width, width) + linear(f"{prefix}.mlp.fc2", width, 2 * width)
        rows += layer_norm(f"{prefix}.layer_norm1", width) + layer_norm(f"{prefix}.layer_norm2", width)
    return rows + layer_norm("text_model.final_layer_norm", width)


def t5(width: int, *, layers: int = 2, heads: int = 2) -> list[Row]:
    """T5's encoder, `width` wide."""
    rows = [Row("shared.weight", (T5_VOCABULARY, width), 1.0)]
    for index in range(layers):
        prefix = f"encoder.block.{index}.layer"
        for name in ("q", "k", "v", "o"):
            rows += linear(f"{prefix}.0.SelfAttention.{name}", width, width, bias=False)
        if index == 0:
            rows.append(Row(f"{prefix}.0.SelfAttention.relative_attention_bias.weight", (T5_BUCKETS, heads), 1.0))
        for name in ("wi_0", "wi_1"):
            rows += linear(f"{prefix}.1.DenseReluDense.{name}", 2 * width, width, bias=False)
        rows += linear(f"{prefix}.1.DenseReluDense.wo", width, 2 * width, bias=False)
        rows += [Row(f"{prefix}.{part}.layer_norm.weight", (width,), 0.0, 1.0) for part in (0, 1)]
    return rows + [Row("encoder.final_layer_norm.weight", (width,), 0.0, 1.0)]


def convolution(
    name: str, out: int, channels: int, *, bias: bool = True, gain: float = 1.0, bias_mean: float = 0.0
) -> list[Row]:
    """A 3 x 3 convolution that keeps the variance through a ReLU, times `gain` squared."""
    rows = [Row(f"{name}.weight", (out, channels, 3, 3), gain * 1.4 / math.sqrt(9 * channels))]
    return rows + ([Row(f"{name}.bias", (out,), 0.0, bias_mean)] if bias else [])


def residual_block(name: str) -> list[Row]:
    """TAESD's block of three convolutions, the last one weak, as in trained networks: ten blocks do not overflow."""
    return [
        row
        for part, gain in ((0, 1.0), (2, 1.0), (4, 0.3))
        for row in convolution(f"{name}.conv.{part}", TAESD_WIDTH, TAESD_WIDTH, gain=gain)
    ]


def taesd() -> list[Row]:
    """Encoder and decoder of TAESD for Flux's 16 latent channels, as the stock VAE loader takes them."""
    rows = convolution("taesd_encoder.0", TAESD_WIDTH, 3) + residual_block("taesd_encoder.1")
    for stage in range(3):
        first = 2 + 4 * stage
        rows += convolution(f"taesd_encoder.{first}", TAESD_WIDTH, TAESD_WIDTH, bias=False)
        for block in range(first + 1, first + 4):
            rows += residual_block(f"taesd_encoder.{block}")
    rows += convolution("taesd_encoder.14", LATENT_CHANNELS, TAESD_WIDTH)
    rows += convolution("taesd_decoder.1", TAESD_WIDTH, LATENT_CHANNELS)
    for stage in range(3):
        first = 3 + 5 * stage
        for block in range(first, first + 3):
            rows += residual_block(f"taesd_decoder.{block}")
        rows += convolution(f"taesd_decoder.{first + 4}", TAESD_WIDTH, TAESD_WIDTH, bias=False)
    # Colours around the middle grey: a picture that is clipped to black and white would hide errors of the latent.
    rows += residual_block("taesd_decoder.18")
    rows += convolution("taesd_decoder.19", 3, TAESD_WIDTH, gain=PICTURE_GAIN, bias_mean=0.5)
    return rows + [Row("vae_scale", (), 0.0, 1.0), Row("vae_shift", (), 0.0)]
