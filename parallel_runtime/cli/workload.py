"""What verify and bench run: random inputs of an image's size, and the devices they run on.

Owns the step's tensors and how two results are compared. Starts nothing.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..adapters.flux_config import FluxConfig
from ..devices import DeviceSelection, parse_devices
from ..plan import ParallelPlan
from ..strategies.shard import SequenceShard

PIXELS_PER_LATENT = 8
LATENTS_PER_TOKEN = 2


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One call of the model: sizes in pixels and tokens, and the seed of its random inputs."""

    width: int
    height: int
    text_tokens: int
    batch: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        limits = {"width": (16, 16384), "height": (16, 16384), "text_tokens": (1, 8192), "batch": (1, 64)}
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if not low <= value <= high:
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
    def image_tokens(self) -> int:
        """Number of image tokens."""
        return self.grid[0] * self.grid[1]

    def tensors(self, config: FluxConfig) -> dict[str, torch.Tensor]:
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


def relative_error(result: torch.Tensor, reference: torch.Tensor) -> float:
    """Norm of the difference over the norm of the reference, in fp64. 0 for empty tensors, NaN never passes."""
    if reference.numel() == 0:
        return 0.0
    difference = (result.double() - reference.double()).norm() / reference.double().norm()
    return float(difference)


def error_by_rank(
    result: torch.Tensor, reference: torch.Tensor, *, plan: ParallelPlan, text_tokens: int
) -> list[float]:
    """`relative_error` over the rows each sequence rank computed, in rank order."""
    parts = plan.ring * plan.ulysses
    errors = []
    for index in range(parts):
        rows = SequenceShard(text_tokens, result.shape[1], parts, index).image
        errors.append(relative_error(result[:, rows], reference[:, rows]))
    return errors


def worst(errors: list[float]) -> float:
    """The largest error; NaN, wherever it stands, is the worst of all."""
    return math.nan if any(math.isnan(error) for error in errors) else max(errors)


def euler(model: object, tensors: Mapping[str, torch.Tensor], steps: int) -> torch.Tensor:
    """`steps` Euler steps of the flow from sigma 1 to 0 (one step is one plain call of the model)."""
    if not callable(model):
        raise TypeError(f"{model!r} is not callable")
    if steps == 1:
        return model(tensors)
    img = tensors["img"]
    sigmas = torch.linspace(1, 0, steps + 1)
    for now, after in zip(sigmas[:-1], sigmas[1:], strict=True):
        velocity = model({**tensors, "img": img, "timesteps": now.expand(img.shape[0])})
        img = img.clone()
        img[..., : velocity.shape[2]] += (after - now) * velocity
    return img[..., : velocity.shape[2]]
