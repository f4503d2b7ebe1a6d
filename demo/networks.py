"""The demo's three networks as plain torch modules, with the names of weights that ComfyUI's files have.

Owns: `Flux` (Flux.1's transformer without guidance, as black-forest-labs/flux defines it), `Autoencoder` (TAESD, after
madebyollin/taesd, with 16 channels), `Classifier` (ours), read from their bf16 files.
Letters: `B` batch, `S` tokens (text first, then image), `C` hidden size, `H` heads, `D` head size.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from .words import COLOURS, PLACES, THINGS, WIDTH

CHANNELS = 16  # of a latent
PATCH = 2
HEAD = 128  # ComfyUI's only head size for Flux.1
AXES = (16, 56, 56)


def sinusoids(t: Tensor) -> Tensor:
    """Of t (B) in 0..1, as (B, 256) fp32."""
    angles = t.float()[:, None] * 1000 * torch.exp(torch.arange(128, device=t.device) * (-math.log(10_000) / 128))
    return torch.cat((torch.cos(angles), torch.sin(angles)), -1)


@functools.lru_cache(8)
def rotations(rows: int, columns: int, num_text: int, device: torch.device) -> Tensor:
    """Each token's rotation, (S, D / 2) complex64; text stands at the origin."""
    ids = torch.zeros(rows, columns, 3, dtype=torch.float64, device=device)
    ids[..., 1] = torch.arange(rows, device=device)[:, None]
    ids[..., 2] = torch.arange(columns, device=device)
    ids = F.pad(ids.view(-1, 3), (0, 0, num_text, 0))
    angles = [
        ids[:, axis, None] * 10_000.0 ** -(torch.arange(0, width, 2, dtype=torch.float64, device=device) / width)
        for axis, width in enumerate(AXES)
    ]
    whole = torch.cat(angles, -1).float()
    return torch.complex(torch.cos(whole), torch.sin(whole))


def modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Layer norm of x (B, S, C), scaled and shifted by (B, 1, C)."""
    with torch.autocast(x.device.type, enabled=False):  # which would make it fp32, at twice the time of a step
        return torch.addcmul(shift, F.layer_norm(x, x.shape[-1:], eps=1e-6), 1 + scale)


class Embedder(nn.Module):
    """Two linear layers around a SiLU."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.in_layer, self.out_layer = nn.Linear(width, hidden), nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """(B, width) to (B, C)."""
        return self.out_layer(F.silu(self.in_layer(x)))


class Modulation(nn.Module):
    """`parts` vectors (B, 1, C) made of one (B, C); all zero at first, so that every block starts as nothing."""

    def __init__(self, hidden: int, parts: int) -> None:
        super().__init__()
        self.parts, self.lin = parts, nn.Linear(hidden, parts * hidden)
        nn.init.zeros_(self.lin.weight)
        nn.init.zeros_(self.lin.bias)

    def forward(self, vec: Tensor) -> tuple[Tensor, ...]:
        """Shift, scale and gate, once or twice."""
        return self.lin(F.silu(vec))[:, None].chunk(self.parts, -1)


class QueryKeyNorm(nn.Module):
    """RMS norms of queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.query_norm, self.key_norm = nn.RMSNorm(HEAD, eps=1e-6), nn.RMSNorm(HEAD, eps=1e-6)

    def forward(self, qkv: Tensor, rope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys, values (B, S, H, D) of qkv (B, S, 3 C), queries and keys normed and rotated by (S, D / 2)."""
        q, k, v = qkv.unflatten(-1, (3, -1, HEAD)).unbind(2)
        return rotated(q, self.query_norm, rope), rotated(k, self.key_norm, rope), v


def rotated(x: Tensor, norm: nn.RMSNorm, rope: Tensor) -> Tensor:
    """x (B, S, H, D) normed in its own type, weighed and rotated in fp32."""
    normed = F.rms_norm(x, (HEAD,), eps=1e-6) * norm.weight  # fp32, as the weight is
    pairs = torch.view_as_complex(normed.unflatten(-1, (-1, 2))) * rope[:, None]
    return torch.view_as_real(pairs).flatten(-2).to(x.dtype)


class Attention(nn.Module):
    """One stream's part of a double block's attention."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.qkv, self.proj, self.norm = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden), QueryKeyNorm()


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of q, k, v (B, S, H, D) over all tokens, (B, S, C)."""
    return F.scaled_dot_product_attention(*(each.transpose(1, 2) for each in (q, k, v))).transpose(1, 2).flatten(2)


class DoubleBlock(nn.Module):
    """Two streams that attend together."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        for stream in ("img", "txt"):
            self.add_module(f"{stream}_mod", Modulation(hidden, 6))
            self.add_module(f"{stream}_attn", Attention(hidden))
            mlp = nn.Sequential(
                nn.Linear(hidden, 4 * hidden), nn.GELU(approximate="tanh"), nn.Linear(4 * hidden, hidden)
            )
            self.add_module(f"{stream}_mlp", mlp)

    def forward(self, img: Tensor, txt: Tensor, vec: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """Both streams, (B, S, C) each, after the block."""
        img_mod, txt_mod = self.img_mod(vec), self.txt_mod(vec)
        words = txt.shape[1]
        of_txt = self.txt_attn.norm(self.txt_attn.qkv(modulated(txt, txt_mod[0], txt_mod[1])), rope[:words])
        of_img = self.img_attn.norm(self.img_attn.qkv(modulated(img, img_mod[0], img_mod[1])), rope[words:])
        attended = attend(*(torch.cat(pair, 1) for pair in zip(of_txt, of_img, strict=True)))
        txt = txt + txt_mod[2] * self.txt_attn.proj(attended[:, : txt.shape[1]])
        img = img + img_mod[2] * self.img_attn.proj(attended[:, txt.shape[1] :])
        txt = txt + txt_mod[5] * self.txt_mlp(modulated(txt, txt_mod[3], txt_mod[4]))
        return img + img_mod[5] * self.img_mlp(modulated(img, img_mod[3], img_mod[4])), txt


class SingleBlock(nn.Module):
    """One stream, its attention and MLP side by side."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.modulation, self.norm = Modulation(hidden, 3), QueryKeyNorm()
        self.linear1, self.linear2 = nn.Linear(hidden, 7 * hidden), nn.Linear(5 * hidden, hidden)

    def forward(self, x: Tensor, vec: Tensor, rope: Tensor) -> Tensor:
        """x (B, S, C) after the block."""
        shift, scale, gate = self.modulation(vec)
        packed, mlp = self.linear1(modulated(x, shift, scale)).split((3 * x.shape[-1], 4 * x.shape[-1]), -1)
        attended = attend(*self.norm(packed, rope))
        return x + gate * self.linear2(torch.cat((attended, F.gelu(mlp, approximate="tanh")), -1))


class LastLayer(nn.Module):
    """Tokens to patches of the velocity; zero at first."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, CHANNELS * PATCH**2)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden, 2 * hidden))
        for layer in (self.linear, self.adaLN_modulation[1]):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor, vec: Tensor) -> Tensor:
        """(B, S, C) to (B, S, 64)."""
        shift, scale = self.adaLN_modulation(vec)[:, None].chunk(2, -1)
        return self.linear(modulated(x, shift, scale))


class Flux(nn.Module):
    """Flux.1's transformer without guidance, over any even latent."""

    def __init__(self, hidden: int, depth: int, single: int) -> None:
        super().__init__()
        if hidden % HEAD:
            raise ValueError(f"a width of {hidden} is no multiple of {HEAD}, ComfyUI's head size; use 256 or 384")
        self.img_in, self.txt_in = nn.Linear(CHANNELS * PATCH**2, hidden), nn.Linear(WIDTH, hidden)
        self.time_in, self.vector_in = Embedder(256, hidden), Embedder(WIDTH, hidden)
        self.double_blocks = nn.ModuleList(DoubleBlock(hidden) for _ in range(depth))
        self.single_blocks = nn.ModuleList(SingleBlock(hidden) for _ in range(single))
        self.final_layer = LastLayer(hidden)

    def forward(self, latent: Tensor, t: Tensor, text: Tensor, pooled: Tensor) -> Tensor:
        """The velocity (B, 16, h, w) fp32 of latent (B, 16, h, w) at t (B) in 0..1, text (B, words, 128)."""
        rows, columns = latent.shape[2] // PATCH, latent.shape[3] // PATCH
        patches = latent.unflatten(2, (rows, PATCH)).unflatten(4, (columns, PATCH))  # (B, 16, rows, 2, columns, 2)
        img = self.img_in(patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2))
        txt, vec = self.txt_in(text), self.time_in(sinusoids(t)) + self.vector_in(pooled)
        rope = rotations(rows, columns, txt.shape[1], latent.device)
        for block in self.double_blocks:
            img, txt = block(img, txt, vec, rope)
        x = torch.cat((txt, img), 1)
        for block in self.single_blocks:
            x = block(x, vec, rope)
        out = self.final_layer(x[:, txt.shape[1] :], vec).float().unflatten(2, (CHANNELS, PATCH, PATCH))
        return out.unflatten(1, (rows, columns)).permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)


def conv(inputs: int, outputs: int, **options: object) -> nn.Conv2d:
    """A 3x3 convolution."""
    return nn.Conv2d(inputs, outputs, 3, padding=1, **options)  # type: ignore[arg-type]


class Block(nn.Module):
    """TAESD's residual block of 64 channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(conv(64, 64), nn.ReLU(), conv(64, 64), nn.ReLU(), conv(64, 64))

    def forward(self, x: Tensor) -> Tensor:
        """(B, 64, h, w) to the same."""
        return F.relu(self.conv(x) + x)


class Clamp(nn.Module):
    """Keeps latents within -3..3, smoothly."""

    def forward(self, x: Tensor) -> Tensor:
        """Any shape."""
        return torch.tanh(x / 3) * 3


class Autoencoder(nn.Module):
    """TAESD with 16 channels: pictures (B, 3, h, w) in 0..1 to latents (B, 16, h / 8, w / 8) of about unit variance."""

    def __init__(self) -> None:
        super().__init__()
        halved = [(conv(64, 64, stride=2, bias=False), Block(), Block(), Block()) for _ in range(3)]
        doubled = [(Block(), Block(), Block(), nn.Upsample(scale_factor=2), conv(64, 64, bias=False)) for _ in range(3)]
        self.taesd_encoder = nn.Sequential(conv(3, 64), Block(), *sum(halved, ()), conv(64, CHANNELS))
        decoder = (Clamp(), conv(CHANNELS, 64), nn.ReLU(), *sum(doubled, ()), Block(), conv(64, 3))
        self.taesd_decoder = nn.Sequential(*decoder)

    def encode(self, pictures: Tensor) -> Tensor:
        """The latents, fp32."""
        return self.taesd_encoder(pictures).float()

    def decode(self, latents: Tensor) -> Tensor:
        """The pictures, fp32; not clamped."""
        return self.taesd_decoder(latents).float()


class Classifier(nn.Module):
    """Says of pictures (B, 3, 128, 128) in 0..1 which thing, colour and place they show; the last class is "none"."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in ((3, 32), (32, 64), (64, 96), (96, 128)):
            layers += [conv(inputs, outputs, stride=2), nn.GroupNorm(8, outputs), nn.SiLU()]
        self.features = nn.Sequential(*layers, nn.Conv2d(128, 32, 1), nn.SiLU(), nn.Flatten(), nn.Linear(2048, 256))
        self.thing, self.colour, self.place = (nn.Linear(256, len(names) + 1) for names in (THINGS, COLOURS, PLACES))

    def forward(self, pictures: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits (B, classes) of thing, colour and place, fp32."""
        features = F.silu(self.features(pictures * 2 - 1))
        return self.thing(features).float(), self.colour(features).float(), self.place(features).float()


def load(path: Path, device: torch.device) -> nn.Module:
    """The network of a file of `models/`, in fp32."""
    weights = {name.replace("norm.scale", "norm.weight"): value.float() for name, value in load_file(path).items()}
    if "img_in.weight" in weights:
        counts = [
            len({name.split(".")[1] for name in weights if name.startswith(kind)}) for kind in ("double_", "single_")
        ]
        network: nn.Module = Flux(weights["img_in.weight"].shape[0], *counts)
    else:
        network = Classifier() if "thing.weight" in weights else Autoencoder()
    network.load_state_dict({name: value for name, value in weights.items() if not name.startswith("vae_")})
    return network.to(device).eval()
