"""What Flux.1's blocks do to tensors alone: rotations, norms, modulations. Knows no weights by name and no block.

Letters: `B` batch, `S` tokens, `C` hidden size, `H` heads, `D` head size. Source of the arithmetic:
black-forest-labs/flux, `math.py` and `modules/layers.py`; rounding follows ComfyUI's reading of it.
"""

import math

import torch
import torch.nn.functional as F

from .config import TIME_FACTOR, TIME_WIDTH

EPS = 1e-6
THETA = 10_000
RowWeights = tuple[tuple[torch.Tensor, slice], ...]  # a weight and the rows that take it


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


def normed_and_rotated(x: torch.Tensor, weights: RowWeights, rope: torch.Tensor) -> torch.Tensor:
    """RMS norm, weight and rotation of x (B, S, 2, H, D), queries and keys at once: small operations cost by number.

    `weights` says which rows of S take which; all from the weight to the rotation is fp32, rounded once. rope
    (1, S, 1, D / 2) complex, or (S, D / 2, 2) real, cosine and sine: a compiler fuses no complex numbers, and without
    one four products take seven kernels where a complex one takes one.
    """
    normed = F.rms_norm(x, x.shape[-1:], eps=EPS)
    if not rope.is_complex():
        scaled = torch.cat([normed[:, rows] * weight for weight, rows in weights], 1)
        a, b = scaled.unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = rope[:, None, None].unbind(-1)  # (S, 1, 1, D / 2)
        return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).to(x.dtype)
    scaled = torch.empty_like(normed, dtype=torch.float32)
    for weight, rows in weights:
        torch.mul(normed[:, rows], weight, out=scaled[:, rows])
    pairs = torch.view_as_complex(scaled.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs.mul_(rope[:, :, None])).flatten(-2).to(x.dtype)


def gelu_into(out: torch.Tensor, x: torch.Tensor) -> None:
    """The tanh GELU of x, written to `out` by one kernel; a compiler takes no kernel that is told where to write."""
    if torch.compiler.is_compiling():
        out.copy_(F.gelu(x, approximate="tanh"))
    else:
        torch.ops.aten.gelu.out(x, approximate="tanh", out=out)


def by_row(values: torch.Tensor, zero_timestep: torch.Tensor | None) -> torch.Tensor:
    """Modulations (B, 1 or 2, ...) to those of each row (B, S, ...), or as they are when all rows share one."""
    return values if zero_timestep is None else values[:, zero_timestep]


def modulated(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Layer norm of x (B, S, C), times `scale`, which has its 1, plus `shift`. One kernel where all rows share them."""
    if shift.shape[:2] == (1, 1):
        return F.layer_norm(x, x.shape[-1:], scale[0, 0], shift[0, 0], EPS)
    return torch.addcmul(shift, F.layer_norm(x, x.shape[-1:], eps=EPS), scale)


def bound(x: torch.Tensor) -> None:
    """fp16 overflows in Flux's text blocks; keep what overflowed at the largest number, as ComfyUI does."""
    if x.dtype == torch.float16:
        torch.nan_to_num_(x, nan=0.0, posinf=65504, neginf=-65504)
