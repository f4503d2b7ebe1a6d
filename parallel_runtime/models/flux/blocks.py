"""The arithmetic of Flux.1's blocks, on one rank's tokens and one block's weights: run as it stands, or traced.

Letters: `B` batch, `S` tokens of this rank (text first, then image), `C` hidden size, `H` heads, `D` head size.

`adapter.py` calls these functions kernel by kernel; torch's compiler makes graphs of the halves at the end, which are
nothing but the same functions, one after the other. Both add the residual to `x` in place: a graph may write to its
input. Two kernels alone depend on who runs (`normed_and_rotated` and `gelu_into` of math.py). Owns no choice of
when a half is compiled, which is `models/flux/compiled.py`'s.
"""

from collections.abc import Mapping
from typing import Protocol

import torch
import torch.nn.functional as F

from .math import bound, by_row, gelu_into, modulated, normed_and_rotated

Modulation = tuple[torch.Tensor, ...]
Values = tuple[torch.Tensor, ...]
QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


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


def _heads(packed: torch.Tensor, norms: tuple[tuple[torch.Tensor, slice], ...], rope: torch.Tensor) -> QKV:
    qkv = packed.unflatten(-1, (3, -1, norms[0][0].shape[-1]))  # (B, S, 3, H, D)
    q, k = normed_and_rotated(qkv[:, :, :2], norms, rope).unbind(2)
    return q, k, qkv[:, :, 2]


def _norm_weights(w: Linear, name: str) -> torch.Tensor:
    """What queries and keys are multiplied by after their norm, (2, 1, D) in fp32."""
    return torch.stack((w[f"{name}.query_norm.weight"], w[f"{name}.key_norm.weight"]))[:, None].float()


# The weights that the two halves of a block take, by kind of block; a layer has a weight and a bias.
BEFORE = {
    "double": tuple(
        f"{stream}_attn.{part}"
        for stream in ("txt", "img")
        for part in ("qkv.weight", "qkv.bias", "norm.query_norm.weight", "norm.key_norm.weight")
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


class _Traced:
    """Weights that a graph takes as arguments, so that one graph serves all blocks of a kind."""

    def __init__(self, names: tuple[str, ...], values: Values) -> None:
        self._tensors: Mapping[str, torch.Tensor] = dict(zip(names, values, strict=True))

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._tensors[f"{name}.weight"], self._tensors[f"{name}.bias"])


def double_before(
    x: torch.Tensor,
    text_rows: torch.Tensor,
    zero_timestep: torch.Tensor | None,
    rows: Modulation,
    rope: torch.Tensor,
    weights: Values,
) -> Values:
    """`double_qkv` to trace. `text_rows` (T,) is there for its length, so that a graph serves every length of text.

    `zero_timestep` as in `Tokens`; `rows` of `modulation_rows`; rope (S, D / 2, 2), cosine and sine; `weights` as in
    `BEFORE`.
    """
    num_text = text_rows.shape[0]
    mod = double_modulation(rows, zero_timestep, num_text)
    return double_qkv(_Traced(BEFORE["double"], weights), x, num_text, mod, rope)


def double_after(
    x: torch.Tensor,
    text_rows: torch.Tensor,
    zero_timestep: torch.Tensor | None,
    rows: Modulation,
    attn: torch.Tensor,
    weights: Values,
) -> None:
    """`double_rest` to trace, as `double_before`; attn (B, S, C), `weights` as in `AFTER`."""
    num_text = text_rows.shape[0]
    mod = double_modulation(rows, zero_timestep, num_text)
    double_rest(_Traced(AFTER["double"], weights), x, num_text, mod, attn)


def single_before(
    x: torch.Tensor, zero_timestep: torch.Tensor | None, rows: Modulation, rope: torch.Tensor, weights: Values
) -> Values:
    """As `double_before`, of a single block; last, what its MLP takes through GELU, (B, S, MLP)."""
    w, hidden = _Traced(BEFORE["single"], weights), x.shape[-1]
    mod = single_modulation(rows, zero_timestep)
    fused = w.linear("linear1", modulated(x, mod[0], mod[1]))
    return *single_qkv(w, fused[..., : 3 * hidden], rope), fused[..., 3 * hidden :]


def single_after(
    x: torch.Tensor,
    zero_timestep: torch.Tensor | None,
    rows: Modulation,
    attn: torch.Tensor,
    mlp: torch.Tensor,
    weights: Values,
) -> None:
    """As `double_after`, of a single block; mlp (B, S, MLP) is `single_before`'s last."""
    w, hidden = _Traced(AFTER["single"], weights), x.shape[-1]
    joined = activated(mlp, hidden)
    joined[..., :hidden] = attn
    single_rest(x, single_modulation(rows, zero_timestep), w.linear("linear2", joined))
