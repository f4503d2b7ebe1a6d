"""Whether the demo's model draws what it is asked: the classifier's verdict over combinations that no training saw.

Owns: sampling with the plain networks, the figures, the contact sheet, the picture of the curves. Does not own:
sampling in ComfyUI (run.py).
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from torch import Tensor

from .networks import CHANNELS, Autoencoder, Classifier, Flux
from .pictures import SIZE, Painter, as_indices
from .trainer import numbers, show
from .words import THINGS, Combination, combinations, encode

STEPS = 20
PARTS = ("thing", "colour", "place")
THUMB, COLUMNS = 64, 20


@torch.no_grad()
def sample(transformer: Flux, prompts: Sequence[str], *, cfg: float, seed: int, device: torch.device) -> Tensor:
    """Latents (N, 16, 16, 16) of prompts: 20 Euler steps, as ComfyUI takes with the scheduler "simple"."""
    generator = numbers("sample", seed, 0, device)
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


@torch.no_grad()
def evaluate(
    painter: Painter, autoencoder: Autoencoder, classifier: Classifier, transformer: Flux, options: argparse.Namespace
) -> dict:
    """All figures; writes the contact sheet. Percentages are over the 200 unseen combinations."""
    device, wanted = painter.glyphs.device, combinations()[1][: options.judged]
    prompts = [each.prompt() for each in wanted]
    painted = painter.paint(as_indices(wanted, device), numbers("evaluation", options.seed, 0, device))
    latents = in_parts(autoencoder, "encode", painted)
    rebuilt = in_parts(autoencoder, "decode", latents).clamp(0, 1)
    error = float((rebuilt - painted).square().mean())
    figures: dict = {
        "unseen_combinations": len(wanted),
        "parameters": {
            name: count(each)
            for name, each in (("transformer", transformer), ("autoencoder", autoencoder), ("classifier", classifier))
        },
        "autoencoder_psnr_db": round(-10 * math.log10(error), 2),
        "latent_std": round(float(latents.std()), 3),
        "classifier_on_rendered": summary(agreement(classifier, painted, wanted)),
        "classifier_on_rebuilt": summary(agreement(classifier, rebuilt, wanted)),
        "drawn": {},
    }
    noise = torch.rand(painted.shape, device=device, generator=numbers("noise", options.seed, 0, device))
    figures["noise"] = summary(agreement(classifier, noise, wanted))
    torch.manual_seed(options.seed)
    untrained = Flux(transformer.img_in.out_features, len(transformer.double_blocks), len(transformer.single_blocks))
    for name, network in (("untrained", untrained), ("random_gates", with_random_gates(untrained))):
        x = sample(network.to(device), prompts, cfg=1.0, seed=options.seed, device=device)
        figures[name] = summary(agreement(classifier, in_parts(autoencoder, "decode", x).clamp(0, 1), wanted))
    for cfg in options.cfg:
        x = sample(transformer, prompts, cfg=cfg, seed=options.seed, device=device)
        pictures = in_parts(autoencoder, "decode", x).clamp(0, 1)
        agreed = agreement(classifier, pictures, wanted)
        misses = [each.thing for each, right in zip(wanted, agreed.all(1).tolist(), strict=True) if not right]
        wrong = Counter(list(THINGS)[thing] for thing in misses)
        figures["drawn"][f"cfg {cfg:g}"] = {**summary(agreed), "wrong": dict(wrong)}
        show(f"cfg {cfg:g}: {figures['drawn'][f'cfg {cfg:g}']}")
        contact_sheet(pictures, agreed, options.output / f"contact_cfg_{cfg:g}.jpg")
    return figures


def count(network: torch.nn.Module) -> int:
    """Parameters."""
    return sum(each.numel() for each in network.parameters())


def with_random_gates(network: Flux) -> Flux:
    """The same network with every weight that starts at zero drawn at random, so that it computes something."""
    generator = torch.Generator().manual_seed(1)
    for each in network.parameters():
        if not each.any():
            each.data = torch.randn(each.shape, generator=generator).to(each.device) * (0.05 if each.ndim > 1 else 0.5)
    return network


def contact_sheet(pictures: Tensor, agreed: Tensor, path: Path) -> None:
    """Thumbnails in the order of the combinations; a red frame where the classifier sees something else."""
    rows = math.ceil(len(pictures) / COLUMNS)
    sheet = Image.new("RGB", (COLUMNS * (THUMB + 4), rows * (THUMB + 4)), "white")
    drawing = ImageDraw.Draw(sheet)
    for index, (picture, right) in enumerate(zip(as_images(pictures), agreed.all(1).tolist(), strict=True)):
        left, top = index % COLUMNS * (THUMB + 4), index // COLUMNS * (THUMB + 4)
        if not right:
            drawing.rectangle((left, top, left + THUMB + 3, top + THUMB + 3), fill="red")
        sheet.paste(picture.resize((THUMB, THUMB), Image.Resampling.LANCZOS), (left + 2, top + 2))
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path, quality=90)


def as_images(pictures: Tensor) -> list[Image.Image]:
    """Pictures (N, 3, h, w) in 0..1 as images."""
    bytes_ = (pictures.clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
    return [Image.fromarray(each) for each in bytes_]


def draw_curves(curves: dict[str, list[float]], every: int, path: Path) -> None:
    """Loss by step, a panel a network, on logarithmic scales of loss."""
    width, height, margin = 420, 240, 36
    image = Image.new("RGB", (width * max(len(curves), 1), height), "white")
    drawing = ImageDraw.Draw(image)
    for panel, (name, curve) in enumerate(curves.items()):
        left, values = panel * width + margin, [math.log(max(each, 1e-9)) for each in curve]
        drawing.text((left, 8), f"{name}: loss to step {len(curve) * every}", fill="black")
        if len(values) < 2:
            continue
        low, high = min(values), max(values)
        span = max(high - low, 1e-9)
        for value in (low, high):
            y = height - margin - (value - low) / span * (height - 2 * margin)
            drawing.text((left - margin + 2, y - 5), f"{math.exp(value):.2g}", fill="black")
        points = [
            (
                left + index / (len(values) - 1) * (width - 2 * margin),
                height - margin - (value - low) / span * (height - 2 * margin),
            )
            for index, value in enumerate(values)
        ]
        drawing.line(points, fill="black")
    image.save(path)
