"""Which tensors each model file holds: names, shapes and how each is initialised, in ComfyUI's own formats.

A layout is a list of `Row`s, so a file can be written tensor by tensor and its size is known before any value is made.
Fixed by ComfyUI's detection and so not variable here: heads of 128, MLP ratio 4, 16 latent channels, 2 x 2 patches.
"""

import math
from dataclasses import dataclass

HEAD_DIM = 128
PATCH = 4  # 2 x 2 latent pixels become one token
LATENT_CHANNELS = 16


@dataclass(frozen=True)
class Row:
    """One tensor: values are `mean + std * normal`; `std` 0 makes a constant."""

    name: str
    shape: tuple[int, ...]
    std: float
    mean: float = 0.0


@dataclass(frozen=True, kw_only=True)
class FluxShape:
    """The sizes of a Flux transformer; `in_channels` as ComfyUI counts them (16 dev and schnell, 96 Fill)."""

    hidden: int = 256
    depth: int = 2
    single: int = 2
    ctx: int = 64
    vec: int = 32
    in_channels: int = 16
    guidance: bool = True

    def __post_init__(self) -> None:
        if self.hidden % HEAD_DIM:
            raise ValueError(
                f"hidden={self.hidden} is not a multiple of {HEAD_DIM}, the head size ComfyUI fixes for Flux"
            )


def linear(
    name: str, rows: int, columns: int, *, gain: float = 1.0, bias: bool = True, bias_mean: float = 0.0
) -> list[Row]:
    """A linear layer whose output keeps the variance of its input (times `gain` squared)."""
    layer = [Row(f"{name}.weight", (rows, columns), gain / math.sqrt(columns))]
    if bias:
        layer.append(Row(f"{name}.bias", (rows,), 0.25 if bias_mean else 0.02, bias_mean))
    return layer


def modulation(name: str, rows: int, hidden: int) -> list[Row]:
    """Shift, scale and gate of an adaptive norm. Gates are about 1: near 0, errors of attention would not show."""
    return linear(name, rows, hidden, gain=0.5, bias_mean=1.0)


def qk_norm(name: str, suffix: str) -> list[Row]:
    """Query and key norms; 1.5 keeps attention from being nearly uniform, which would hide errors as well."""
    return [Row(f"{name}.{part}_norm.{suffix}", (HEAD_DIM,), 0.1, 1.5) for part in ("query", "key")]


def embedders(shape: FluxShape) -> list[Row]:
    """The input projections and the vectors added to the timestep."""
    names = [("time_in", 256), ("vector_in", shape.vec)] + ([("guidance_in", 256)] if shape.guidance else [])
    rows = linear("img_in", shape.hidden, shape.in_channels * PATCH) + linear("txt_in", shape.hidden, shape.ctx)
    for name, columns in names:
        rows += linear(f"{name}.in_layer", shape.hidden, columns)
        rows += linear(f"{name}.out_layer", shape.hidden, shape.hidden)
    return rows


def double_block(index: int, hidden: int, suffix: str) -> list[Row]:
    """One double-stream block: image and text with weights of their own."""
    rows: list[Row] = []
    for stream in ("img", "txt"):
        prefix = f"double_blocks.{index}.{stream}"
        rows += modulation(f"{prefix}_mod.lin", 6 * hidden, hidden)
        rows += linear(f"{prefix}_attn.qkv", 3 * hidden, hidden) + qk_norm(f"{prefix}_attn.norm", suffix)
        rows += linear(f"{prefix}_attn.proj", hidden, hidden)
        rows += linear(f"{prefix}_mlp.0", 4 * hidden, hidden) + linear(f"{prefix}_mlp.2", hidden, 4 * hidden)
    return rows


def single_block(index: int, hidden: int, suffix: str) -> list[Row]:
    """One single-stream block: q, k, v and the MLP's first layer are fused into `linear1`."""
    prefix = f"single_blocks.{index}"
    rows = linear(f"{prefix}.linear1", 7 * hidden, hidden) + linear(f"{prefix}.linear2", hidden, 5 * hidden)
    return rows + qk_norm(f"{prefix}.norm", suffix) + modulation(f"{prefix}.modulation.lin", 3 * hidden, hidden)


def flux(shape: FluxShape, *, norm_suffix: str = "scale") -> list[Row]:
    """A Flux transformer under the original names; `norm_suffix="weight"` is how ComfyUI itself saves the norms."""
    rows = embedders(shape)
    for index in range(shape.depth):
        rows += double_block(index, shape.hidden, norm_suffix)
    for index in range(shape.single):
        rows += single_block(index, shape.hidden, norm_suffix)
    rows += linear("final_layer.linear", LATENT_CHANNELS * PATCH, shape.hidden)
    return rows + modulation("final_layer.adaLN_modulation.1", 2 * shape.hidden, shape.hidden)


def lora_fused(shape: FluxShape, *, rank: int = 4) -> list[Row]:
    """A LoRA under kohya's names for the original, fused layers, with an alpha of half the rank."""
    hidden, rows = shape.hidden, []
    layers = [("attn.qkv", 3, 1), ("attn.proj", 1, 1), ("mlp.0", 4, 1), ("mod.lin", 6, 1)]
    targets = [
        (f"double_blocks.{index}.{stream}_{name}", rows_h, columns_h)
        for index in range(shape.depth)
        for stream in ("img", "txt")
        for name, rows_h, columns_h in layers
    ]
    targets += [(f"single_blocks.{index}.linear1", 7, 1) for index in range(shape.single)]
    targets += [(f"single_blocks.{index}.linear2", 1, 5) for index in range(shape.single)]
    for name, rows_h, columns_h in targets:
        key = "lora_unet_" + name.replace(".", "_")
        rows.append(Row(f"{key}.lora_up.weight", (rows_h * hidden, rank), 0.3))
        rows.append(Row(f"{key}.lora_down.weight", (rank, columns_h * hidden), 1 / math.sqrt(columns_h * hidden)))
        rows.append(Row(f"{key}.alpha", (), 0.0, rank / 2))
    return rows


def lora_diffusers(shape: FluxShape, *, rank: int = 4) -> list[Row]:
    """A LoRA under diffusers' names: split q, k, v and MLP, and `norm_out`, whose halves ComfyUI swaps."""
    double = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "to_out.0")
    targets = [(f"transformer_blocks.{i}.attn.{name}", 1, 1) for i in range(shape.depth) for name in double]
    for index in range(shape.single):
        prefix = f"single_transformer_blocks.{index}"
        targets += [(f"{prefix}.attn.{name}", 1, 1) for name in ("to_q", "to_k", "to_v")]
        targets += [(f"{prefix}.proj_mlp", 4, 1), (f"{prefix}.proj_out", 1, 5)]
    targets.append(("norm_out.linear", 2, 1))
    rows: list[Row] = []
    for name, rows_h, columns_h in targets:
        columns = columns_h * shape.hidden
        rows.append(Row(f"transformer.{name}.lora_A.weight", (rank, columns), 1 / math.sqrt(columns)))
        rows.append(Row(f"transformer.{name}.lora_B.weight", (rows_h * shape.hidden, rank), 0.3))
    return rows


def controlnet_xlabs(shape: FluxShape) -> list[Row]:
    """XLabs' ControlNet: an image hint through convolutions; residuals for double blocks only."""
    rows = embedders(shape)
    for index in range(shape.depth):
        rows += double_block(index, shape.hidden, "scale")
        rows += linear(f"controlnet_blocks.{index}", shape.hidden, shape.hidden)
    rows += linear("pos_embed_input", shape.hidden, LATENT_CHANNELS * PATCH)
    for index in range(8):
        channels = 3 if index == 0 else 16
        rows.append(Row(f"input_hint_block.{2 * index}.weight", (16, channels, 3, 3), 1 / math.sqrt(9 * channels)))
        rows.append(Row(f"input_hint_block.{2 * index}.bias", (16,), 0.0))
    return rows


def diffusers_double_block(index: int, hidden: int) -> list[Row]:
    """The same block as `double_block` under diffusers' names."""
    prefix = f"transformer_blocks.{index}"
    rows = modulation(f"{prefix}.norm1.linear", 6 * hidden, hidden)
    rows += modulation(f"{prefix}.norm1_context.linear", 6 * hidden, hidden)
    projections = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "to_out.0", "to_add_out")
    for name in projections:
        rows += linear(f"{prefix}.attn.{name}", hidden, hidden)
    for norm in ("norm_q", "norm_k", "norm_added_q", "norm_added_k"):
        rows.append(Row(f"{prefix}.attn.{norm}.weight", (HEAD_DIM,), 0.1, 1.5))
    for ff in ("ff", "ff_context"):
        rows += linear(f"{prefix}.{ff}.net.0.proj", 4 * hidden, hidden)
        rows += linear(f"{prefix}.{ff}.net.2", hidden, 4 * hidden)
    return rows


def diffusers_single_block(index: int, hidden: int) -> list[Row]:
    """The same block as `single_block` under diffusers' names."""
    prefix = f"single_transformer_blocks.{index}"
    rows = modulation(f"{prefix}.norm.linear", 3 * hidden, hidden)
    for name in ("to_q", "to_k", "to_v"):
        rows += linear(f"{prefix}.attn.{name}", hidden, hidden)
    rows += [Row(f"{prefix}.attn.{norm}.weight", (HEAD_DIM,), 0.1, 1.5) for norm in ("norm_q", "norm_k")]
    return rows + linear(f"{prefix}.proj_mlp", 4 * hidden, hidden) + linear(f"{prefix}.proj_out", hidden, 5 * hidden)


def controlnet_union(shape: FluxShape, *, modes: int = 7) -> list[Row]:
    """InstantX's Union ControlNet: a latent hint, a mode token before the text, residuals for both kinds of block."""
    hidden, embed = shape.hidden, "time_text_embed"
    rows = linear("x_embedder", hidden, LATENT_CHANNELS * PATCH) + linear("context_embedder", hidden, shape.ctx)
    vectors = [("timestep_embedder", 256), ("text_embedder", shape.vec), ("guidance_embedder", 256)]
    for name, columns in vectors if shape.guidance else vectors[:2]:
        rows += linear(f"{embed}.{name}.linear_1", hidden, columns) + linear(f"{embed}.{name}.linear_2", hidden, hidden)
    for index in range(shape.depth):
        rows += diffusers_double_block(index, hidden) + linear(f"controlnet_blocks.{index}", hidden, hidden)
    for index in range(shape.single):
        rows += diffusers_single_block(index, hidden) + linear(f"controlnet_single_blocks.{index}", hidden, hidden)
    rows += linear("controlnet_x_embedder", hidden, LATENT_CHANNELS * PATCH)
    return rows + [Row("controlnet_mode_embedder.weight", (modes, hidden), 1.0)]
