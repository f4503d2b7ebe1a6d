"""The arithmetic of Flux.1's blocks, on one rank's tokens and one block's weights: run as it stands, or traced.

Letters: `B` batch, `S` tokens of this rank (text first, then image), `C` hidden size, `H` heads, `D` head size.

`adapter.py` calls these functions kernel by kernel; `compiled.py` has torch's compiler make graphs of them. Both add
the residual to `x` in place: a graph may write to its input. Two functions alone depend on who runs,
`normed_and_rotated` and `gelu_into`. Source: black-forest-labs/flux, `math.py` and `modules/layers.py`; rounding
follows ComfyUI's reading of it.
"""

from typing import Protocol

import torch
import torch.nn.functional as F

Modulation = tuple[torch.Tensor, ...]
QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
RowWeights = tuple[tuple[torch.Tensor, slice], ...]  # a weight and the rows that take it
EPS = 1e-6


class Linear(Protocol):
    """The weights of one block, by their names there."""

    def __getitem__(self, name: str) -> torch.Tensor:
        """One weight."""
        ...

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """x (..., columns) through the linear layer `name`, to (..., rows)."""
        ...


def double_modulation(rows: Modulation, zero_timestep: torch.Tensor | None, num_text: int) -> Modulation:
    """Shift, 1 + scale and gate of a double block's `modulation_rows`: of the image twice, then of the text twice."""
    return by_row(rows[0], None if zero_timestep is None else zero_timestep[num_text:]).chunk(6, -1) + rows[1].chunk(
        6, -1
    )


def single_modulation(rows: Modulation, zero_timestep: torch.Tensor | None) -> Modulation:
    """Shift, 1 + scale and gate of a single block's `modulation_rows`."""
    return by_row(rows[0], zero_timestep).chunk(3, -1)


def double_qkv(w: Linear, x: torch.Tensor, num_text: int, mod: Modulation, rope: torch.Tensor) -> QKV:
    """Queries and keys, normed and rotated, and values of a double block, each (B, S, H, D)."""
    text = w.linear("txt_attn.qkv", modulated(x[:, :num_text], mod[6], mod[7]))
    image = w.linear("img_attn.qkv", modulated(x[:, num_text:], mod[0], mod[1]))
    norms = (
        (_norm_weights(w, "txt_attn.norm"), slice(num_text)),
        (_norm_weights(w, "img_attn.norm"), slice(num_text, None)),
    )
    return _heads(torch.cat((text, image), 1), norms, rope)


def double_rest(w: Linear, x: torch.Tensor, num_text: int, mod: Modulation, attn: torch.Tensor) -> None:
    """What follows a double block's attention attn (B, S, C), in place on its tokens x (B, S, C)."""
    _stream_rest(w, "txt", x[:, :num_text], mod[6:], attn[:, :num_text])
    _stream_rest(w, "img", x[:, num_text:], mod[:6], attn[:, num_text:])
    bound(x)


def single_qkv(w: Linear, packed: torch.Tensor, rope: torch.Tensor) -> QKV:
    """As `double_qkv`, of a single block, from packed (B, S, 3 C), the attention's rows of `linear1`."""
    return _heads(packed, ((_norm_weights(w, "norm"), slice(None)),), rope)


def activated(mlp: torch.Tensor, hidden: int) -> torch.Tensor:
    """A single block's MLP through its GELU, (B, S, C + MLP): C columns stay free for the attention, saving a copy."""
    joined = mlp.new_empty((*mlp.shape[:2], hidden + mlp.shape[-1]))
    gelu_into(joined[..., hidden:], mlp)
    return joined


def single_rest(x: torch.Tensor, mod: Modulation, product: torch.Tensor) -> None:
    """The residual of a single block, in place on its tokens x (B, S, C); `product` is of its attention and MLP."""
    x.addcmul_(mod[2], product)
    bound(x)


def _stream_rest(w: Linear, stream: str, x: torch.Tensor, mod: Modulation, attn: torch.Tensor) -> None:
    """Projection and MLP of one stream of a double block, in place on x; `mod` holds its six values."""
    x.addcmul_(mod[2], w.linear(f"{stream}_attn.proj", attn))
    hidden = F.gelu(w.linear(f"{stream}_mlp.0", modulated(x, mod[3], mod[4])), approximate="tanh")
    x.addcmul_(mod[5], w.linear(f"{stream}_mlp.2", hidden))


def _heads(packed: torch.Tensor, norms: RowWeights, rope: torch.Tensor) -> QKV:
    qkv = packed.unflatten(-1, (3, -1, norms[0][0].shape[-1]))  # (B, S, 3, H, D)
    q, k = normed_and_rotated(qkv[:, :, :2], norms, rope).unbind(2)
    return q, k, qkv[:, :, 2]


def _norm_weights(w: Linear, name: str) -> torch.Tensor:
    """What queries and keys are multiplied by after their norm, (2, 1, D) in fp32."""
    return torch.stack((w[f"{name}.query_norm.weight"], w[f"{name}.key_norm.weight"]))[:, None].float()


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
