"""Whether the demo's model draws what it is asked: the classifier's verdict over combinations that no training saw.

Owns: sampling with the plain networks, and the shares that are right. Does not own: sampling in ComfyUI (run.py).
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from .networks import CHANNELS, Classifier, Flux
from .pictures import SIZE, as_indices
from .words import Combination, encode

STEPS = 20
PARTS = ("thing", "colour", "place")


@torch.no_grad()
def sample(transformer: Flux, prompts: Sequence[str], *, cfg: float, seed: int, device: torch.device) -> Tensor:
    """Latents (N, 16, 16, 16) of prompts: 20 Euler steps, as ComfyUI takes with the scheduler "simple"."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"sample:{seed}:0".encode()))
    x = torch.randn(len(prompts), CHANNELS, SIZE // 8, SIZE // 8, device=device, generator=generator)
    encoded = [encode(prompt) for prompt in prompts]
    text, pooled = (torch.stack(part).to(device) for part in zip(*encoded, strict=True))
    for step in range(STEPS):
        t = torch.full((len(prompts),), 1 - step / STEPS, device=device)
        velocity = transformer(x, t, text, pooled)
        if cfg != 1:
            without = transformer(x, t, torch.zeros_like(text), torch.zeros_like(pooled))
            velocity = without + cfg * (velocity - without)
        x = x - velocity / STEPS
    return x


@torch.no_grad()
def in_parts(network: torch.nn.Module, method: str, x: Tensor) -> Tensor:
    """A method of a network on a large batch, 50 rows at a time."""
    return torch.cat([getattr(network, method)(part) for part in x.split(50)])


@torch.no_grad()
def agreement(classifier: Classifier, pictures: Tensor, wanted: Sequence[Combination]) -> Tensor:
    """(N, 3) bool: whether each picture shows the thing, the colour, the place that was asked."""
    classes = torch.cat([torch.stack([each.argmax(1) for each in classifier(part)], 1) for part in pictures.split(50)])
    return classes == as_indices(wanted, pictures.device)


def summary(agreed: Tensor) -> dict[str, float]:
    """Percentages of (N, 3) agreements: each part, and all three at once."""
    parts = {part: float(agreed[:, axis].float().mean() * 100) for axis, part in enumerate(PARTS)}
    return {
        name: round(value, 1) for name, value in (parts | {"all": float(agreed.all(1).float().mean() * 100)}).items()
    }


def with_random_gates(network: Flux) -> Flux:
    """The same network with every weight that starts at zero drawn at random, so that it computes something."""
    generator = torch.Generator().manual_seed(1)
    for each in network.parameters():
        if not each.any():
            each.data = torch.randn(each.shape, generator=generator).to(each.device) * (0.05 if each.ndim > 1 else 0.5)
    return network
