"""The two halves of each kind of Flux.1 block as functions of tensors alone, for a compiler to make graphs of.

Letters: `B` batch, `S` tokens of this rank (text first, then image), `T` the text's of them, `C` hidden size, `H`
heads, `D` head size.

The same arithmetic as flux.py's, without what a compiler cannot take in one piece: no writing in place, rotations in
real numbers, and the number of text rows as the length of a tensor, so that a graph serves every size. All weights
are arguments: one graph serves all blocks. Owns no choice of when a half is compiled (rank/compiled.py).
"""

import torch
import torch.nn.functional as F

from .flux import Modulation
from .flux_math import EPS, by_row, modulated

# The linear layers and norms of each half, in the order in which `before` and `after` take their weights.
BEFORE = {
    "double": (
        *("txt_attn.qkv.weight", "txt_attn.qkv.bias", "txt_attn.norm.query_norm.weight"),
        *("txt_attn.norm.key_norm.weight", "img_attn.qkv.weight", "img_attn.qkv.bias"),
        *("img_attn.norm.query_norm.weight", "img_attn.norm.key_norm.weight"),
    ),
    "single": ("linear1.weight", "linear1.bias", "norm.query_norm.weight", "norm.key_norm.weight"),
}
AFTER = {
    "double": tuple(
        f"{stream}_{layer}.{part}"
        for stream in ("txt", "img")
        for layer in ("attn.proj", "mlp.0", "mlp.2")
        for part in ("weight", "bias")
    ),
    "single": ("linear2.weight", "linear2.bias"),
}
Values = tuple[torch.Tensor, ...]


def double_before(
    x: torch.Tensor,
    text_rows: torch.Tensor,
    still: torch.Tensor | None,
    rows: Modulation,
    rope: torch.Tensor,
    weights: Values,
) -> Values:
    """Queries, keys and values, each (B, S, H, D), of a double block's tokens x (B, S, C).

    `text_rows` (T,) is there for its length; `still` (S,) as in `Tokens`; `rows` of `modulation_rows`; rope
    (S, D / 2, 2), cosine and sine.
    """
    num_text = text_rows.shape[0]
    image_mod = by_row(rows[0], None if still is None else still[num_text:]).chunk(6, -1)
    text_mod = rows[1].chunk(6, -1)
    text = F.linear(modulated(x[:, :num_text], text_mod[0], text_mod[1]), weights[0], weights[1])
    image = F.linear(modulated(x[:, num_text:], image_mod[0], image_mod[1]), weights[4], weights[5])
    qkv = _heads(torch.cat((text, image), 1), weights[2])
    is_text = torch.arange(x.shape[1], device=x.device)[:, None, None] < num_text
    q, k = (
        _rotated(_normed(qkv[:, :, i]) * torch.where(is_text, weights[2 + i].float(), weights[6 + i].float()), rope)
        for i in range(2)
    )
    return q.to(x.dtype), k.to(x.dtype), qkv[:, :, 2]


def double_after(
    x: torch.Tensor,
    text_rows: torch.Tensor,
    still: torch.Tensor | None,
    rows: Modulation,
    attn: torch.Tensor,
    weights: Values,
) -> Values:
    """The tokens (B, S, C) after a double block, alone, from those before it and attn (B, S, C)."""
    num_text = text_rows.shape[0]
    image_mod = by_row(rows[0], None if still is None else still[num_text:]).chunk(6, -1)
    text = _stream_rest(x[:, :num_text], attn[:, :num_text], rows[1].chunk(6, -1), weights[:6])
    image = _stream_rest(x[:, num_text:], attn[:, num_text:], image_mod, weights[6:])
    return (_bounded(torch.cat((text, image), 1)),)


def single_before(
    x: torch.Tensor, still: torch.Tensor | None, rows: Modulation, rope: torch.Tensor, weights: Values
) -> Values:
    """As `double_before`, of a single block; last, what its MLP takes through GELU, (B, S, MLP)."""
    shift, scale, _ = by_row(rows[0], still).chunk(3, -1)
    fused = F.linear(modulated(x, shift, scale), weights[0], weights[1])
    width = x.shape[-1]
    qkv = _heads(fused[..., : 3 * width], weights[2])
    q, k = (_rotated(_normed(qkv[:, :, i]) * weights[2 + i].float(), rope).to(x.dtype) for i in range(2))
    return q, k, qkv[:, :, 2], fused[..., 3 * width :]


def single_after(
    x: torch.Tensor,
    still: torch.Tensor | None,
    rows: Modulation,
    attn: torch.Tensor,
    mlp: torch.Tensor,
    weights: Values,
) -> Values:
    """As `double_after`, of a single block; mlp (B, S, MLP) is `single_before`'s last."""
    gate = by_row(rows[0], still).chunk(3, -1)[2]
    joined = torch.cat((attn, F.gelu(mlp, approximate="tanh")), -1)
    return (_bounded(x + gate * F.linear(joined, weights[0], weights[1])),)


def _heads(qkv: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """(B, S, 3 * C) to (B, S, 3, H, D); a norm's weight is (D,)."""
    return qkv.unflatten(-1, (3, -1, norm.shape[0]))


def _normed(x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=EPS).float()


def _rotated(x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """x (B, S, H, D) fp32, pairs of neighbours turned by rope (S, D / 2, 2)."""
    cos, sin = rope[:, None].unbind(-1)  # (S, 1, D / 2)
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


def _stream_rest(x: torch.Tensor, attn: torch.Tensor, mod: Values, weights: Values) -> torch.Tensor:
    """Projection and MLP of one stream of a double block."""
    x = x + mod[2] * F.linear(attn, weights[0], weights[1])
    hidden = F.gelu(F.linear(modulated(x, mod[3], mod[4]), weights[2], weights[3]), approximate="tanh")
    return x + mod[5] * F.linear(hidden, weights[4], weights[5])


def _bounded(x: torch.Tensor) -> torch.Tensor:
    """As flux.py bounds what overflowed in fp16."""
    return torch.nan_to_num(x, nan=0.0, posinf=65504, neginf=-65504) if x.dtype == torch.float16 else x
