"""Calls of a small Wan in a pool of workers, as ComfyUI's sampler makes them step by step; no ComfyUI in this process.

48 tokens: patches and ranks of the plans here divide them, so a patch is the same tokens however many ranks share it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from families.hosted import WAN
from families.variants import write_families
from host.fetch import comfyui_path
from parallel_runtime.checkpoint import HOSTED, ComfyUI, ModelSpec
from parallel_runtime.models.hosted.calls import to_tree
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.calls import ModelCall
from parallel_runtime.pool.pool import Pool

STEPS = 3
TEXTS = (7, 12)  # of the two conditionings, so they are two calls


def write_wan(folder: Path) -> ModelSpec:
    """A Wan of three blocks and five heads, as ComfyUI's modules compute it."""
    models = write_families(folder, only=[WAN.name])
    path = models / "diffusion_models" / WAN.file
    return ModelSpec.of(path, "float32", adapter=HOSTED, comfyui=ComfyUI(str(comfyui_path()), ()))


def call(step: int, *, text: int, batch: int = 1, size: tuple[int, int, int] = (2, 8, 12)) -> ModelCall:
    """A call of step number `step`, of a latent of `size`: frames, height, width."""
    numbers = torch.Generator().manual_seed(100 * text + batch)
    x = torch.randn(batch, 16, *size, generator=numbers)
    context = torch.randn(batch, text, 48, generator=numbers)
    x = x + 0.4 * step * torch.randn(x.shape, generator=numbers)
    t = torch.full((batch,), 900.0 - 200 * step)
    tree, tensors = to_tree({"args": [x, t, context], "kwargs": {"transformer_options": {}}})
    options = {"call": tree, "tensors": 3, "batched": [0, 1, 2], "residuals": [], "method": None}
    named = {f"t{number}": tensor for number, tensor in enumerate(tensors)}
    return ModelCall(tensors=named, out_shape=(batch, x[0].numel()), out_dtype=torch.float32, options=options)


def run_steps(
    pool: Pool,
    spec: ModelSpec,
    plan: ParallelPlan,
    *,
    run: str,
    options: Mapping[str, object] | None = None,
    batch: int = 1,
    texts: Sequence[int] = TEXTS,
) -> list[torch.Tensor]:
    """The results of each step, both conditionings' side by side; `run` is the sampling run's name."""
    found = []
    for step in range(STEPS):
        calls = []
        for text in texts:
            made = call(step, text=text, batch=batch)
            told = {**made.options, **(options or {}), "pipeline": {"run": run, "key": f"text of {text}"}}
            calls.append(replace(made, options=told))
        found.append(torch.cat(pool.run(spec, plan, calls).outs, 1))
    return found
