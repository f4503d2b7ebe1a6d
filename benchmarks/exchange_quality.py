"""What heads that travel as fp8 do to the demo's pictures: PSNR, SSIM, the classifier's verdict, over unseen prompts.

`PYTHONPATH=.:tests python -m benchmarks.exchange_quality [--prompts 200]` prints rows for the table of docs/quality.md:
the same prompts, noise, steps and figures as its other rows. The model is ComfyUI's class in two CPU ranks; the
reference is that class in one; all is in fp32. Takes some minutes. Owns the cases and the figures.
"""

from __future__ import annotations

import argparse
import tempfile
import zlib
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from demo import networks
from demo.evaluation import STEPS, agreement, in_parts
from demo.graphs import MODELS, TRANSFORMER
from demo.words import combinations, encode
from host.fetch import comfyui_path
from models.gloo_group import GlooGroup
from models.ranks import Ranks

SEED, SIDE, PATCH = 21, 8, 2
BATCH = 20  # prompts that are drawn at once
# By the row's name: the kind of ranks, None for one, and the format of the exchange.
CASES = {
    "single": (None, "exact"),
    "ulysses=2, fp8 exchange": ("ulysses", "fp8"),
    "ring=2, fp8 exchange": ("ring", "fp8"),
}


def noise_of(number: int) -> Tensor:
    """The noise (16, 16, 16) of a prompt, by its number among those that training never saw."""
    seeded = torch.Generator().manual_seed(zlib.crc32(f"quality:{SEED}:{number}".encode()))
    tokens = torch.randn(SIDE, SIDE, networks.CHANNELS, PATCH, PATCH, generator=seeded)
    return tokens.permute(2, 0, 3, 1, 4).reshape(networks.CHANNELS, SIDE * PATCH, SIDE * PATCH)


def draw(group: GlooGroup, name: str, count: int, file: str) -> None:
    """In a rank: sample the first `count` prompts as a case says; the first rank writes latents (N, 16, 16, 16)."""
    import comfy.sd

    from parallel_runtime.models.hosted.hooks import SharedModel
    from parallel_runtime.models.specs import spec_of

    kind, exchange = CASES[name]
    weights = load_file(MODELS / TRANSFORMER)
    model = comfy.sd.load_diffusion_model_state_dict(
        weights, model_options={"dtype": torch.float32}
    ).model.diffusion_model
    if kind is not None:
        shared = SharedModel(model, spec_of(type(model)), GlooGroup(ring=kind == "ring"))
        shared.group.exchange = exchange
    wanted, latents = combinations()[1][:count], []
    for start in range(0, count, BATCH):
        some = range(start, min(start + BATCH, count))
        x = torch.stack([noise_of(number) for number in some])
        text, pooled = (torch.stack(part) for part in zip(*(encode(wanted[n].prompt()) for n in some), strict=True))
        for step in range(STEPS):  # Euler over "simple", as ComfyUI takes for this model
            time = torch.full((len(some),), 1 - step / STEPS)
            x = x - model(x, time, text, pooled, None) / STEPS
        latents.append(x)
    if group.index == 0:
        save_file({"latents": torch.cat(latents)}, file)


def psnr(pictures: Tensor, reference: Tensor) -> Tensor:
    """(N) dB of pictures in 0..1; infinite where they are equal."""
    return -10 * (pictures - reference).square().flatten(1).mean(1).log10()


def ssim(pictures: Tensor, reference: Tensor) -> Tensor:
    """(N) structural similarity (Wang et al. 2004) of pictures in 0..1: a Gaussian window of 11, sigma 1.5."""
    pictures, reference = pictures.double(), reference.double()  # spreads are small differences of large numbers
    axis = torch.exp(-((torch.arange(11).double() - 5) ** 2) / (2 * 1.5**2))
    window = (axis[:, None] * axis / axis.sum() ** 2).expand(3, 1, 11, 11)

    def mean(x: Tensor) -> Tensor:
        return F.conv2d(x, window, groups=3)

    a, b = mean(pictures), mean(reference)
    spread_a, spread_b = mean(pictures**2) - a**2, mean(reference**2) - b**2
    common = mean(pictures * reference) - a * b
    low, high = 0.01**2, 0.03**2
    whole = (2 * a * b + low) * (2 * common + high) / ((a**2 + b**2 + low) * (spread_a + spread_b + high))
    return whole.flatten(1).mean(1)


def main() -> None:
    """Draw each case, and print its row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=200, help="of the 200 that training never saw")
    count = parser.parse_args().prompts
    cpu, reference = torch.device("cpu"), None
    autoencoder, classifier = (
        networks.load(MODELS / f"demo_{n}.safetensors", cpu) for n in ("autoencoder", "classifier")
    )
    ranks = Ranks(comfyui_path())
    with tempfile.TemporaryDirectory() as folder:
        for name, (kind, _) in CASES.items():
            file = Path(folder) / "latents.safetensors"
            ranks.run(draw, name, count, str(file), ranks=1 if kind is None else 2)
            pictures = in_parts(autoencoder, "decode", load_file(file)["latents"]).clamp(0, 1)
            reference = pictures if reference is None else reference
            shown = agreement(classifier, pictures, combinations()[1][:count]).all(1).float().mean() * 100
            found, like = psnr(pictures, reference), ssim(pictures, reference).mean()
            middle, worst = ("equal" if value.isinf() else f"{value:.1f}" for value in (found.median(), found.min()))
            print(f"| `{name}` | {count} | {middle} | {worst} | {like:.4f} | {shown:.1f} % |  |", flush=True)  # noqa: T201
    ranks.close()


if __name__ == "__main__":
    main()
