"""Attention on one device: one function for the whole softmax, one that also returns its log-sum-exp.

Letters: `B` batch, `S` query tokens, `T` key tokens, `H` heads, `D` head size. Layout is (B, S, H, D) throughout. A
mask (B or 1, S, T) is added to the scores; `additive_mask` makes one.
Owns the choice of torch's kernels and the empty cases that crash or poison them. Knows no rank.
"""

import torch
import torch.nn.functional as F

aten = torch.ops.aten
# A score this low has no weight in any softmax. Minus infinity would make a part that is masked whole NaN.
MASKED = -3e4


def additive_mask(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask as it is added to the scores: True (attend) and False, or values to add, to finite values of `dtype`."""
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, MASKED)
    return mask.to(dtype).clamp(min=MASKED)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Softmax attention. q (B, S, H, D), k and v (B, T, H, D) with T > 0; returns (B, S, H, D)."""
    if q.shape[1] == 0:
        return q
    bias = None if mask is None else mask[:, None]
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=bias)
    return out.transpose(1, 2)


def attention_with_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over a part of the keys. S and T must be above zero: torch's CPU kernel dies on empty input.

    Returns out (B, S, H, D) and the log-sum-exp of the scores (B, S, H, 1) in fp32, with which parts are merged.
    """
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))  # (B, H, S, D)
    if q.device.type == "cpu":
        bias = None if mask is None else mask[:, None]
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=bias)[:2]
    elif mask is None and q.dtype in (torch.float16, torch.bfloat16):
        out, lse = aten._scaled_dot_product_flash_attention(q, k, v)[:2]
    else:
        bias = None if mask is None else _aligned_bias(mask, heads=q.shape[1], batch=q.shape[0])
        out, lse = aten._scaled_dot_product_efficient_attention(q, k, v, bias, True)[:2]
    lse = lse[:, :, : q.shape[2]]  # the memory-efficient kernel pads the queries to a multiple of 32
    return out.transpose(1, 2), lse.to(torch.float32).transpose(1, 2).unsqueeze(-1)


def _aligned_bias(mask: torch.Tensor, *, heads: int, batch: int) -> torch.Tensor:
    """(B or 1, S, T) to (B, H, S, T) with rows that start at multiples of 16 bytes, as the kernel wants them."""
    keys = mask.shape[-1]
    padded = F.pad(mask, (0, -keys % 8))[..., :keys]
    return padded[:, None].expand(batch, heads, -1, -1)


def merge(
    out: torch.Tensor, lse: torch.Tensor, part_out: torch.Tensor, part_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fold one more part into a running result, in fp32 and in place.

    out, part_out (B, S, H, D); lse, part_lse (B, S, H, 1). Source: Ring Attention (arXiv 2310.01889), the update
    written as one interpolation with weight sigmoid(part_lse - lse), as in zhuzilin/ring-flash-attention PR 34.
    """
    out.lerp_(part_out.to(torch.float32), torch.sigmoid(part_lse - lse))
    # Not lse - logsigmoid(lse - part_lse): after a part that is masked whole, that loses three digits.
    return out, torch.logaddexp(lse, part_lse)
