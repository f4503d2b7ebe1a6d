"""The demo's pictures under step caches: ComfyUI's EasyCache and LazyCache, and the first-block cache of the workers.

ComfyUI's own functions decide for the first two, around each prompt's calls of the workers as in its own loop; the last
is computed by ComfyUI's own module. A picture is drawn by itself, since images of a batch would decide together.

Owns: the 20 steps of one picture with a cache around them. Does not own: prompts, noise and table (quality.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from host.fetch import comfyui_path
from parallel_runtime.checkpoint import HOSTED, ComfyUI, ModelSpec
from parallel_runtime.models.hosted.calls import to_tree
from parallel_runtime.models.hosted.comfyui import import_comfyui
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.calls import ModelCall
from parallel_runtime.pool.pool import Pool

from .evaluation import STEPS
from .graphs import MODELS, TRANSFORMER
from .networks import CHANNELS, PATCH
from .pictures import SIZE

FIRST_BLOCK = "first block"
STOCK = ("EasyCache", "LazyCache")
START, END, SUBSAMPLE = 0.15, 0.95, 8  # the stock nodes' defaults, and how ComfyUI makes them
SIDE = SIZE // 8 // PATCH  # tokens of a picture's side


@dataclass(frozen=True)
class StepCache:
    """A cache of one of these names, at its threshold."""

    name: str
    threshold: float


def spec_of(cache: StepCache) -> ModelSpec:
    """Who computes the demo's transformer: ComfyUI's own module has a first-block cache, blocks of ours have none."""
    if cache.name == FIRST_BLOCK:
        return ModelSpec.of(MODELS / TRANSFORMER, "float32", adapter=HOSTED, comfyui=ComfyUI(str(comfyui_path())))
    return ModelSpec.of(MODELS / TRANSFORMER, "float32")


class Drawing:
    """One prompt's picture, step by step. `call` is one of the model in tokens; `skipped` counts when it is drawn."""

    def __init__(self, pool: Pool, plan: ParallelPlan, cache: StepCache, call: ModelCall, *, number: int) -> None:
        self._pool, self._plan, self._cache, self._call = pool, plan, cache, call
        self._spec, self._run = spec_of(cache), f"{cache} {plan.describe()} {number}"
        self.skipped = 0
        self._holder = self._around = None
        if cache.name in STOCK:
            import_comfyui(ComfyUI(str(comfyui_path())), torch.device("cpu"))
            from comfy_extras import nodes_easycache as stock

            kind = getattr(stock, f"{cache.name}Holder")
            options = {"subsample_factor": SUBSAMPLE, "offload_cache_diff": False, "output_channels": CHANNELS}
            holder = self._holder = kind(cache.threshold, START, END, **options)
            sigmas = argparse.Namespace(percent_to_sigma=lambda percent: 1 - percent)  # of this model, a flow
            holder.prepare_timesteps(sigmas)
            around: dict[str, Callable[..., Tensor]] = {
                "EasyCache": stock.easycache_forward_wrapper,
                "LazyCache": stock.lazycache_predict_noise_wrapper,
            }
            self._around = around[cache.name]

    def draw(self) -> Tensor:
        """The latent as tokens (S, 64), by Euler's method over the scheduler "simple"."""
        x = latents_of(self._call.tensors["img"])
        for step in range(STEPS):
            sigma = 1 - step / STEPS
            x = x - self._velocity(x, sigma) / STEPS
        if self._holder is not None:
            self.skipped = self._holder.total_steps_skipped
        return tokens_of(x)[0]

    def _velocity(self, x: Tensor, sigma: float) -> Tensor:
        """What the model says of a latent (1, C, H, W), or what a cache says instead."""
        at = torch.tensor([sigma])
        inside: dict[str, Any] = {"easycache": self._holder, "sigmas": at, "uuids": ["prompt"]}
        if self._around is None:
            return self._computed(x, sigma)
        if self._cache.name == "EasyCache":
            self._holder.skip_current_step = False  # as each step begins
            return self._around(lambda latent, *_: self._computed(latent, sigma), x.clone(), at, inside)
        denoised = self._around(
            lambda latent, *_: latent - sigma * self._computed(latent, sigma), x, at, {"transformer_options": inside}
        )
        return (x - denoised) / sigma

    def _computed(self, x: Tensor, sigma: float) -> Tensor:
        at = torch.tensor([sigma])
        if self._cache.name != FIRST_BLOCK:
            tensors = {**self._call.tensors, "img": tokens_of(x), "timesteps": at}
            return latents_of(self._pool.run(self._spec, self._plan, [replace(self._call, tensors=tensors)]).outs[0])
        given = {"y": self._call.tensors["y"], "transformer_options": {}}
        tree, tensors = to_tree({"args": [x, at, self._call.tensors["txt"]], "kwargs": given})
        options = {"call": tree, "tensors": len(tensors), "batched": [], "residuals": [], "method": None}
        kept = {"pipeline": {"run": self._run, "key": "prompt"}, "step_cache": self._cache.threshold}
        named = {f"t{number}": tensor for number, tensor in enumerate(tensors)}
        shape = (1, x.numel())
        call = ModelCall(tensors=named, out_shape=shape, out_dtype=torch.float32, options={**options, **kept})
        result = self._pool.run(self._spec, self._plan, [call])
        cached = result.ran[0].cached
        self.skipped += 0 if cached is None else cached.skipped
        return result.outs[0].view(x.shape)


def latents_of(tokens: Tensor) -> Tensor:
    """Tokens (B, S, 64) as latents (B, 16, 16, 16)."""
    patches = tokens.unflatten(2, (CHANNELS, PATCH, PATCH)).unflatten(1, (SIDE, SIDE))
    return patches.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)


def tokens_of(latents: Tensor) -> Tensor:
    """The way back."""
    patches = latents.unflatten(3, (SIDE, PATCH)).unflatten(2, (SIDE, PATCH))
    return patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
