"""Flux.1 (dev, schnell, Fill, Kontext): its split plan and its blocks as pure functions.

Letters: `B` batch, `S` tokens of this rank (text first, then image), `C` hidden size, `H` heads, `D` head size.

Weights keep the names and the fused layout of the file (qkv as one matrix), so nothing is converted at loading and a
LoRA's keys are the weights' keys. Knows no rank and no collective: every function sees one rank's tokens.
Source of the arithmetic: black-forest-labs/flux, `modules/layers.py`; rounding follows ComfyUI's reading of it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from ..base import Block, Condition, Modulation, Split, Tokens, Weights
from . import blocks
from .blocks import by_row, modulated
from .config import TIME_FACTOR, TIME_WIDTH, FluxConfig

USUAL_TOKENS = 4096 + 512  # of an image of 1024 x 1024 and its text
LAUNCH_FLOPS = 5e8  # what a GPU computes while the host gets one kernel going: 5 us at 100 TFLOP/s
LAUNCHES = {"double": 44, "single": 20}
THETA = 10_000


# What is split over the ranks that share a sequence; everything else is whole on each of them.
SPLIT_PLAN: Mapping[str, Split] = {
    "img": Split(stream="image", dim=1),
    "img_ids": Split(stream="image", dim=0),
    "txt": Split(stream="text", dim=1),
    "txt_ids": Split(stream="text", dim=0),
    "zero_timestep_rows": Split(stream="image", dim=0),
    "control_in": Split(stream="image", dim=1),
    "control_out": Split(stream="image", dim=1),
    "out": Split(stream="image", dim=1),
}
# What has a row for each row of the batch, in dim 0; a mask of one row serves them all. The rest has no batch.
BATCHED = frozenset({"img", "txt", "y", "timesteps", "guidance", "mask", "control_in", "control_out", "out"})


@dataclass
class Mlp:
    """How far a single block's MLP has come: activated, then through its part of the last product too.

    `joined` (B, S, C + MLP) has C columns free for the attention, which saves a copy; `product` is (B, S, C).
    """

    joined: torch.Tensor
    product: torch.Tensor | None = None


StartMlp = Callable[[], Mlp | None]  # what of a block's MLP goes without its attention, and `finish` takes as `mlp`


class FluxAdapter:
    """The functions of one Flux.1 transformer. Holds sizes, no weights and no state."""

    split_plan = SPLIT_PLAN
    batched = BATCHED
    block_prefixes = ("double_blocks.", "single_blocks.")

    def __init__(self, config: FluxConfig) -> None:
        self.config = config
        depths = {"double": config.depth, "single": config.depth_single}
        self.blocks = tuple(
            Block(kind, index, f"{kind}_blocks.{index}.") for kind, depth in depths.items() for index in range(depth)
        )

    def block_cost(self, block: Block) -> float:
        """What a pass through a block costs, in FLOPs: its products for an image of the usual size, and its launches.

        A double block's two streams have the products of a single block's one, and more launches.
        """
        hidden, tokens = self.config.hidden_size, USUAL_TOKENS
        linear = 2 * tokens * (4 * hidden * hidden + 2 * hidden * self.config.mlp_hidden)
        return linear + 4 * tokens * tokens * hidden + LAUNCHES[block.kind] * LAUNCH_FLOPS

    def outside_of_other_stages(self, *, first: bool, last: bool) -> tuple[str, ...]:
        """How the names of weights outside the blocks begin that a stage has no need of, not being the first or last.

        Modulations are made where their blocks are, so every stage has what makes the vectors for them.
        """
        return (() if first else ("img_in.", "txt_in.")) + (() if last else ("final_layer.",))

    def modulation_numbers(self, block: Block, vec: torch.Tensor) -> int:
        """How many numbers `modulation_rows` makes of vec (..., B, 1 or 2, C)."""
        rows = math.prod(vec.shape[:-2])
        parts = 3 * vec.shape[-2] if block.kind == "single" else 6 * vec.shape[-2] + 6  # the text's are of one row
        return rows * parts * self.config.hidden_size

    def condition(self, w: Weights, inputs: Mapping[str, torch.Tensor], *, text: bool = True) -> Condition:
        """What a call needs beside the image, from its inputs (this rank's rows). `w` as in `embed`.

        With timesteps (E, B) in place of (B,), the vectors of E calls at once. `text`: whether the text is projected,
        which only the first of several stages needs.
        """
        dtype = w["time_in.in_layer.weight"].dtype
        txt = w.linear("txt_in", inputs["txt"].to(dtype)) if text else inputs["txt"]
        zero_timestep = _zero_timestep(inputs, txt.shape[1])
        times = inputs["timesteps"][..., None]
        if zero_timestep is not None:
            times = torch.cat((times, torch.zeros_like(times)), -1)
        vec = _mlp_embedder(w, "time_in", timestep_embedding(times).to(dtype))  # (..., B, 1 or 2, C)
        if self.config.guidance and "guidance" in inputs:
            vec = vec + _mlp_embedder(w, "guidance_in", timestep_embedding(inputs["guidance"][:, None]).to(dtype))
        vec = vec + _mlp_embedder(w, "vector_in", inputs["y"][:, None].to(dtype))
        rope = rope_table(torch.cat((inputs["txt_ids"], inputs["img_ids"])), self.config.rope_axes)
        return Condition(txt, F.silu(vec), rope, zero_timestep)

    def embed(self, w: Weights, img: torch.Tensor, condition: Condition) -> Tokens:
        """From this rank's rows of the image to the first block's tokens. `w` holds the weights outside the blocks."""
        x = torch.cat((condition.txt, w.linear("img_in", img.to(w["img_in.weight"].dtype))), 1)
        return Tokens(x, condition.txt.shape[1], condition.vec, condition.rope, condition.zero_timestep)

    def received(self, x: torch.Tensor, condition: Condition) -> Tokens:
        """Tokens (B, S, C) as another stage left them, ready for the next block."""
        return Tokens(x, condition.txt.shape[1], condition.vec, condition.rope, condition.zero_timestep)

    def modulation_rows(self, block: Block, w: Weights, vec: torch.Tensor) -> Modulation:
        """The modulations that a block makes of vec (..., B, 1 or 2, C), for `modulation` to take apart.

        (..., 3 C) in a single block; (..., 6 C) twice in a double one, the image's and the text's. To the scales, 1 is
        added already.
        """
        if block.kind == "single":
            return (self._plus_one(w.linear("modulation.lin", vec)),)
        text = vec[..., :1, :]
        return self._plus_one(w.linear("img_mod.lin", vec)), self._plus_one(w.linear("txt_mod.lin", text))

    def _plus_one(self, rows: torch.Tensor) -> torch.Tensor:
        """Add 1, in place, to the scales among rows (..., 3 C or 6 C) of shift, scale and gate."""
        rows.unflatten(-1, (-1, 3, self.config.hidden_size))[..., 1, :].add_(1)
        return rows

    def modulation(self, block: Block, rows: Modulation, tokens: Tokens) -> Modulation:
        """Shift, 1 + scale and gate, each (B, 1, C): once for a single block; double: image twice, then text twice.

        With rows at timestep zero, those of the image (of all rows in a single block) are (B, rows, C).
        """
        if block.kind == "single":
            return blocks.single_modulation(rows, tokens.zero_timestep)
        return blocks.double_modulation(rows, tokens.zero_timestep, tokens.num_text)

    def qkv(
        self, block: Block, w: Weights, tokens: Tokens, mod: Modulation, *, shared: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, StartMlp]:
        """Queries and keys, normed and rotated, and values, each (B, S, H, D), and what starts the MLP.

        That is a single block's, up to its GELU. `shared`: q, k and v go to other ranks first, so all of it waits
        until they are on their way.
        """
        if block.kind == "double":
            return *blocks.double_qkv(w, tokens.x, tokens.num_text, mod, tokens.rope), _nothing
        x, n = modulated(tokens.x, mod[0], mod[1]), 3 * self.config.hidden_size
        if shared and self._mlp_flops(x) > LAUNCH_FLOPS:  # worth a product of its own
            packed = w.linear("linear1", x, rows=slice(0, n))
            start_mlp: StartMlp = partial(self._mlp, w, x)
        else:
            packed, before = w.linear("linear1", x).split((n, self.config.mlp_hidden), -1)
            start_mlp = partial(self._activated, before)
        return *blocks.single_qkv(w, packed, tokens.rope), start_mlp

    def _mlp_flops(self, x: torch.Tensor) -> float:
        return 2.0 * x.numel() * self.config.mlp_hidden

    def _mlp(self, w: Weights, x: torch.Tensor) -> Mlp:
        return self._activated(w.linear("linear1", x, rows=slice(3 * self.config.hidden_size, None)))

    def _activated(self, mlp: torch.Tensor) -> Mlp:
        return Mlp(blocks.activated(mlp, self.config.hidden_size))

    def overlapped_mlp(self, block: Block, w: Weights, mlp: Mlp | None) -> Mlp | None:
        """What more can be done while the attention's output travels: the MLP's part of a single block's last product.

        `finish` takes it, as it takes what it was made of.
        """
        hidden = self.config.hidden_size
        if mlp is None or self._mlp_flops(mlp.joined[..., :hidden]) <= LAUNCH_FLOPS:
            return mlp
        product = w.linear("linear2", mlp.joined[..., hidden:], columns=slice(hidden, None))
        return Mlp(mlp.joined, product)

    def finish(
        self,
        block: Block,
        w: Weights,
        tokens: Tokens,
        attn: torch.Tensor,
        mod: Modulation,
        *,
        mlp: Mlp | None,
        residual: torch.Tensor | None,
    ) -> None:
        """The rest of the block, in place on `tokens.x`. `residual` (B, <= image rows, C).

        attn (B, S, H, D), H in one dim or in two, which the copy that it needs anyway makes one.
        """
        if mlp is None:
            blocks.double_rest(w, tokens.x, tokens.num_text, mod, attn.flatten(2))
        else:
            blocks.single_rest(tokens.x, mod, self._joined_product(w, attn, mlp))
        self.add_residual(tokens, residual)

    def _joined_product(self, w: Weights, attn: torch.Tensor, mlp: Mlp) -> torch.Tensor:
        """A single block's last product, of its attention and its MLP: (B, S, C)."""
        attention = slice(0, self.config.hidden_size)
        if mlp.product is not None:
            w.add_linear(mlp.product, "linear2", attn.flatten(2), columns=attention)
            return mlp.product
        mlp.joined[..., attention].unflatten(-1, attn.shape[2:]).copy_(attn)
        return w.linear("linear2", mlp.joined)

    def add_residual(self, tokens: Tokens, residual: torch.Tensor | None) -> None:
        """Add a ControlNet's (B, <= image rows, C) to the image's first rows, in place, where there is one."""
        if residual is not None:
            start = tokens.num_text
            tokens.x[:, start : start + residual.shape[1]] += residual

    def head(self, w: Weights, tokens: Tokens) -> torch.Tensor:
        """From the last block to this rank's rows of the velocity, (B, image rows, out channels)."""
        zero_timestep = None if tokens.zero_timestep is None else tokens.zero_timestep[tokens.num_text :]
        shift, scale = by_row(w.linear("final_layer.adaLN_modulation.1", tokens.vec), zero_timestep).chunk(2, -1)
        return w.linear("final_layer.linear", modulated(tokens.x[:, tokens.num_text :], shift, 1 + scale))


def _nothing() -> None:
    """All of a double block waits for its attention."""


def _mlp_embedder(w: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    return w.linear(f"{name}.out_layer", F.silu(w.linear(f"{name}.in_layer", x)))


def _zero_timestep(inputs: Mapping[str, torch.Tensor], num_text: int) -> torch.Tensor | None:
    """1 for rows at timestep zero, 0 for the others, all text among them; None where a step has none."""
    rows = inputs.get("zero_timestep_rows")
    return None if rows is None else F.pad(rows.long(), (num_text, 0))


def timestep_embedding(t: torch.Tensor) -> torch.Tensor:
    """Sinusoids of t (...), in units of a thousandth, as (..., 256) fp32. Source: "Attention Is All You Need", 3.5.

    The dtype of t rounds its thousandfold, as in ComfyUI: a guidance of 3.5 in bf16 becomes 3504. The timestep is fp32:
    rounded to bf16, as diffusers does, a call is 0.9 to 6 % off.
    """
    half = TIME_WIDTH // 2
    exponent = torch.arange(half, dtype=torch.float32, device=t.device) * (-math.log(10_000) / half)
    angles = (t * TIME_FACTOR).float()[..., None] * torch.exp(exponent)
    return torch.cat((torch.cos(angles), torch.sin(angles)), -1)


def rope_table(ids: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
    """Rotations of each token, (1, S, 1, D / 2) complex64, from ids (S, 3). Source: RoFormer (arXiv 2104.09864).

    Angles are computed in fp64 where the device has it, as the reference does.
    """
    real = torch.float32 if ids.device.type == "mps" else torch.float64
    parts = []
    for axis, width in enumerate(axes):
        frequency = THETA ** -(torch.arange(0, width, 2, dtype=real, device=ids.device) / width)
        parts.append(ids[:, axis].to(real)[:, None] * frequency)
    angles = torch.cat(parts, -1)
    return torch.complex(torch.cos(angles).float(), torch.sin(angles).float())[None, :, None]
