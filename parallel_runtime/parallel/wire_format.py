"""Numbers of attention as fp8, for their way between ranks. What is sent so is attention.py's and ring.py's to say.

Letters: `D` size of a head. Source of the two formats called fp8: Micikevicius et al., FP8 Formats for Deep Learning
(arXiv 2209.05433, section 3), of which e4m3 is used.
"""

import torch

from ..exchange_formats import SCALE_BYTES

_CODES, _BIAS, _NO_NUMBER = torch.float8_e4m3fn, 127, 255
# The largest number of a row becomes one from 128 to 256, of the 448 that e4m3 has.
_TOP = 8


def to_fp8(x: torch.Tensor) -> torch.Tensor:
    """(..., D) as bytes (..., D + 1), uint8, which every backend sends: D numbers in e4m3, then their scale.

    Each token of each head has a scale of its own. Attention adds up products over one head of one token, so a row's
    error is relative to that row: the few tokens that are 100 times as large as others (text, registers) cost the
    others nothing, as a scale of a tensor or of a channel would. No rank has to ask another for it, and rows stand
    alone, so they can be cut at any head and token. The scale is a power of two, in one byte: to multiply by it rounds
    nothing. An error is at most 1/16 of the number, down to 2^-13 of the row's largest one. A row that has
    inf or NaN arrives as NaN.
    """
    wide = x.float() if x.dtype is torch.float16 else x  # whose exponents are too few for the product
    largest = torch.linalg.vector_norm(wide, torch.inf, dim=-1, keepdim=True)
    _, exponent = torch.frexp(largest.float())
    exponent = exponent.int().clamp_(_TOP - 126, 127)  # so that both factors are normal numbers
    sent = torch.empty((*x.shape[:-1], x.shape[-1] + SCALE_BYTES), dtype=torch.uint8, device=x.device)
    sent[..., :-SCALE_BYTES].view(_CODES).copy_(wide * _power(_TOP - exponent, wide.dtype))
    sent[..., -SCALE_BYTES:] = (exponent + _BIAS).masked_fill_(~largest.isfinite(), _NO_NUMBER)
    return sent


def from_fp8(sent: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The numbers (..., D) of what `to_fp8` made, in `dtype`."""
    wide = torch.float32 if dtype is torch.float16 else dtype
    scale = sent[..., -SCALE_BYTES:]
    factor = _power(scale.int() - _BIAS - _TOP, wide).masked_fill_(scale == _NO_NUMBER, torch.nan)
    numbers = sent[..., :-SCALE_BYTES].view(_CODES).to(wide).mul_(factor)
    if dtype is torch.float16:  # a number near its largest one may round up beyond it
        numbers = numbers.clamp_(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)
    return numbers


def _power(exponent: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """2 to the power of each int32 from -126 to 127, exactly: the exponent's bits of an fp32."""
    return ((exponent + _BIAS) << 23).view(torch.float32).to(dtype)
