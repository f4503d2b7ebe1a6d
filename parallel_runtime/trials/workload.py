"""The sizes of a model's random inputs, and the devices they run on.

Owns what may be asked for and what is refused; the calls are made in ComfyUI's process. Starts nothing.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..compiling import why_not
from ..devices import Device, DeviceSelection, parse_devices
from ..plan import ParallelPlan

MAX_FRAMES = 1 << 12
MAX_CFG = 1000.0
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
    def shorter_text(self) -> int:
        """Tokens of the text of all calls but the first."""
        return max(1, self.text_tokens * 2 // 3)


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


def is_guided(cfg: float) -> bool:
    """Whether a step at this cfg scale runs the model twice. Raises `ValueError` for one that is out of range."""
    if not 0 <= cfg <= MAX_CFG:
        raise ValueError(f"--cfg={cfg} is outside 0 to {MAX_CFG:g}; use a number in that range")
    return cfg > 1


def worst(errors: Sequence[float]) -> float:
    """The largest error; NaN, wherever it stands, is the worst of all."""
    return math.nan if any(math.isnan(error) for error in errors) else max(errors)


def refuse_uncompilable(devices: Sequence[Device]) -> None:
    """Raise `ValueError` where blocks cannot be compiled for these devices: what was asked for is to be measured."""
    reason = why_not([device.kind for device in devices], os.environ)
    if reason is not None:
        raise ValueError(f"--compile: {reason}, or leave --compile out")
