"""`make quality`: its pictures are those of the plain network, and its figures are what their definitions say."""

from __future__ import annotations

import math

import pytest
import torch

from demo import networks
from demo.evaluation import STEPS, in_parts
from demo.graphs import MODELS, TRANSFORMER
from demo.quality import CPU, REFERENCE, SEED, Case, draw, latents_of, psnr, ssim
from demo.trainer import numbers
from demo.words import combinations, encode

WANTED = combinations()[1][:2]


@pytest.fixture(scope="module")
def autoencoder() -> networks.Autoencoder:
    """The shipped one."""
    return networks.load(MODELS / "demo_autoencoder.safetensors", CPU)


@pytest.mark.slow
@torch.no_grad()
def test_the_reference_is_the_plain_network_and_no_exchange_is_seen(autoencoder: networks.Autoencoder) -> None:
    noise = torch.randn(2, 64, 64, generator=numbers("quality", SEED, 0, CPU))
    x = latents_of(noise)
    text, pooled = (torch.stack(part) for part in zip(*(encode(each.prompt()) for each in WANTED), strict=True))
    network = networks.load(MODELS / TRANSFORMER, CPU)
    for step in range(STEPS):
        x = x - network(x, torch.full((2,), 1 - step / STEPS), text, pooled) / STEPS
    plain = in_parts(autoencoder, "decode", x).clamp(0, 1)
    drawn = draw(REFERENCE, WANTED, batch=1, autoencoder=autoencoder)
    assert (drawn - plain).abs().max() < 1e-4
    broken = draw(Case("ulysses=2", exchange=False), WANTED, batch=2, autoencoder=autoencoder)
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
