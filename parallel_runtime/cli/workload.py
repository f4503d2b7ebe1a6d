"""What verify runs: random inputs of an image's size, and the devices they run on.

Owns the step's tensors and how two results are compared. Starts nothing.
"""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from ..compiling import why_not
from ..devices import Device, DeviceSelection, parse_devices
from ..models.family import StepSizes
from ..plan import ParallelPlan
from ..proof import relative_error as relative_error

PIXELS_PER_LATENT = 8
LATENTS_PER_TOKEN = 2
MAX_FRAMES = 1 << 12
MAX_SEED = 1 << 62  # torch takes 64 bits, and further calls count on from here


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One call of the model: sizes in pixels and tokens, and the seed of its random inputs."""

    width: int
    height: int
    text_tokens: int
    batch: int = 1
    seed: int = 0
    frames: int | None = None  # of a video, None: a few

    def __post_init__(self) -> None:
        limits = {"width": (16, 16384), "height": (16, 16384), "text_tokens": (1, 8192), "batch": (1, 64)}
        limits |= {"frames": (1, MAX_FRAMES)}
        limits |= {"seed": (0, MAX_SEED)}
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                option = name.replace("_", "-")
                raise ValueError(f"--{option}={value} is outside {low} to {high}; use a value in that range")

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of image tokens: pixels to latents (floor), latents to patches of two (padded up)."""
        rows, columns = (
            math.ceil(pixels // PIXELS_PER_LATENT / LATENTS_PER_TOKEN) for pixels in (self.height, self.width)
        )
        return rows, columns

    @property
    def shorter_text(self) -> int:
        """Tokens of the text of all calls but the first."""
        return max(1, self.text_tokens * 2 // 3)

    @property
    def image_tokens(self) -> int:
        """Number of image tokens."""
        return self.grid[0] * self.grid[1]

    def calls(self, config: StepSizes, count: int) -> list[dict[str, torch.Tensor]]:
        """The inputs of `count` calls on images of one size, as cond and uncond are: of unequal text, but the first."""
        texts = [self.text_tokens] + [self.shorter_text] * (count - 1)
        each = (replace(self, text_tokens=text, seed=self.seed + number) for number, text in enumerate(texts))
        return [workload.tensors(config) for workload in each]

    def tensors(self, config: StepSizes) -> dict[str, torch.Tensor]:
        """The step's inputs, normally distributed, by seed."""
        generator = torch.Generator().manual_seed(self.seed)
        rows, columns = self.grid
        ids = torch.zeros(rows, columns, 3)
        ids[..., 1] = torch.arange(rows)[:, None]
        ids[..., 2] = torch.arange(columns)[None]
        tensors = {
            "img": torch.randn(self.batch, self.image_tokens, config.in_channels, generator=generator),
            "txt": torch.randn(self.batch, self.text_tokens, config.context_dim, generator=generator),
            "y": torch.randn(self.batch, config.vec_dim, generator=generator),
            "timesteps": torch.rand(self.batch, generator=generator),
            "img_ids": ids.reshape(-1, 3),
            "txt_ids": torch.zeros(self.text_tokens, 3),
        }
        if config.guidance:
            tensors["guidance"] = torch.full((self.batch,), 3.5)
        return tensors


def choose_devices(text: str | None, plan: ParallelPlan) -> DeviceSelection:
    """The devices a plan runs on; without a wish, as many CUDA devices as the plan has ranks, or as many CPU ranks.

    Raises `ValueError` when there are fewer than the plan needs.
    """
    if text is None:
        text = str(plan.ranks) if torch.cuda.device_count() >= plan.ranks else f"cpu:{plan.ranks}"
    selection = parse_devices(text)
    if len(selection.devices) < plan.ranks:
        raise ValueError(
            f"{plan.describe()} needs {plan.ranks} ranks, --devices {text} gives {len(selection.devices)}; "
            f"use for example --devices cpu:{plan.ranks}"
        )
    return selection


def worst(errors: Sequence[float]) -> float:
    """The largest error; NaN, wherever it stands, is the worst of all."""
    return math.nan if any(math.isnan(error) for error in errors) else max(errors)


def euler(
    run: Callable[[list[dict[str, torch.Tensor]]], list[torch.Tensor]], calls: list[dict[str, torch.Tensor]], steps: int
) -> list[torch.Tensor]:
    """`steps` Euler steps of each call's own flow from sigma 1 to 0 (one step is one plain run of the calls)."""
    if steps == 1:
        return run(calls)
    images = [call["img"] for call in calls]
    sigmas = torch.linspace(1, 0, steps + 1)
    channels: list[int] = []
    for now, after in zip(sigmas[:-1], sigmas[1:], strict=True):
        moved = [
            {**call, "img": img, "timesteps": now.expand(img.shape[0])} for call, img in zip(calls, images, strict=True)
        ]
        velocities = run(moved)
        channels = [velocity.shape[2] for velocity in velocities]
        images = [img.clone() for img in images]
        for img, velocity in zip(images, velocities, strict=True):
            img[..., : velocity.shape[2]] += (after - now) * velocity
    return [img[..., :width] for img, width in zip(images, channels, strict=True)]


def refuse_uncompilable(devices: Sequence[Device]) -> None:
    """Raise `ValueError` where blocks cannot be compiled for these devices: what was asked for is to be measured."""
    reason = why_not([device.kind for device in devices], os.environ)
    if reason is not None:
        raise ValueError(f"--compile: {reason}, or leave --compile out")
