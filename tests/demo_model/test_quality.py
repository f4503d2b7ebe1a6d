"""`make quality`: its pictures are those of the plain network, and its figures are what their definitions say."""

from __future__ import annotations

import math

import pytest
import torch

from demo import networks
from demo.evaluation import STEPS, in_parts
from demo.graphs import MODELS, TRANSFORMER
from demo.quality import CPU, REFERENCE, Case, draw, latents_of, noise_of, psnr, ssim
from demo.words import combinations, encode

WANTED = combinations()[1][:2]


@pytest.fixture(scope="module")
def autoencoder() -> networks.Autoencoder:
    """The shipped one."""
    return networks.load(MODELS / "demo_autoencoder.safetensors", CPU)


def pictures(case: Case, batch: int, autoencoder: networks.Autoencoder) -> torch.Tensor:
    """What a case draws of WANTED."""
    found: dict[str, torch.Tensor] = {}
    for each in draw(case, dict(enumerate(WANTED)), batch=batch):
        found |= each
    latents = torch.stack([found[str(number)] for number in range(len(WANTED))])
    return in_parts(autoencoder, "decode", latents_of(latents)).clamp(0, 1)


@pytest.mark.slow
@torch.no_grad()
def test_the_reference_is_the_plain_network_and_no_exchange_is_seen(autoencoder: networks.Autoencoder) -> None:
    x = latents_of(torch.stack([noise_of(number) for number in range(2)]))
    text, pooled = (torch.stack(part) for part in zip(*(encode(each.prompt()) for each in WANTED), strict=True))
    network = networks.load(MODELS / TRANSFORMER, CPU)
    for step in range(STEPS):
        x = x - network(x, torch.full((2,), 1 - step / STEPS), text, pooled) / STEPS
    plain = in_parts(autoencoder, "decode", x).clamp(0, 1)
    drawn = pictures(REFERENCE, 1, autoencoder)
    assert (drawn - plain).abs().max() < 1e-4
    broken = pictures(Case("ulysses=2", exchange=False), 2, autoencoder)
    assert psnr(broken, drawn).max() < 20


def test_psnr_and_ssim_are_what_they_are_defined_as() -> None:
    picture = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0)) * 0.8
    assert psnr(picture + 0.1, picture).item() == pytest.approx(20, abs=1e-3)
    assert math.isinf(psnr(picture, picture).item())
    assert ssim(picture, picture).item() == pytest.approx(1, abs=1e-5)
    assert ssim(picture.flip(3), picture).item() < 0.3
    flat = torch.full((1, 3, 32, 32), 0.5)
    low = 0.01**2
    assert ssim(flat + 0.25, flat).item() == pytest.approx((2 * 0.375 + low) / (0.75**2 + 0.25 + low), abs=1e-4)
