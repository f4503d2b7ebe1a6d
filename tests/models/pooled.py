"""Calls of a small Wan in a pool of workers, as ComfyUI's sampler makes them step by step; no ComfyUI in this process.

48 tokens: patches and ranks of the plans here divide them, so a patch is the same tokens however many ranks share it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from families.hosted import WAN
from families.variant import Variant
from families.variants import BY_NAME, write_families
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
    return write(folder, WAN)


def write_flux(folder: Path) -> ModelSpec:
    """A Flux.1 of three blocks and five heads, as ComfyUI's modules compute it."""
    return write(folder, BY_NAME["flux.1 t2i"])


def write(folder: Path, variant: Variant) -> ModelSpec:
    """The file of a variant, as ComfyUI's modules compute it."""
    models = write_families(folder, only=[variant.name])
    path = models / "diffusion_models" / variant.file
    return ModelSpec.of(path, "float32", adapter=HOSTED, comfyui=ComfyUI(str(comfyui_path()), ()))


def flux_call(*, text: int = 9, height: int = 10, width: int = 14) -> ModelCall:
    """A call of `write_flux` at half of the noise; sizes of the latent."""
    numbers = torch.Generator().manual_seed(text)
    sizes = ((1, 16, height, width), (1, text, 4096), (1, 768))
    x, context, vector = (torch.randn(size, generator=numbers) for size in sizes)
    return model_call([x, torch.full((1,), 0.5), context, vector, torch.full((1,), 3.5)])


def model_call(args: Sequence[torch.Tensor]) -> ModelCall:
    """A call of a module with these arguments, whose output is as large as the first."""
    tree, tensors = to_tree({"args": list(args), "kwargs": {"transformer_options": {}}})
    batched = list(range(len(tensors)))
    options = {"call": tree, "tensors": len(tensors), "batched": batched, "residuals": [], "method": None}
    named = {f"t{number}": tensor for number, tensor in enumerate(tensors)}
    shape = (args[0].shape[0], args[0][0].numel())
    return ModelCall(tensors=named, out_shape=shape, out_dtype=torch.float32, options=options)


def call(step: int, *, text: int, batch: int = 1, size: tuple[int, int, int] = (2, 8, 12)) -> ModelCall:
    """A call of step number `step`, of a latent of `size`: frames, height, width."""
    numbers = torch.Generator().manual_seed(100 * text + batch)
    x = torch.randn(batch, 16, *size, generator=numbers)
    context = torch.randn(batch, text, 48, generator=numbers)
    x = x + 0.4 * step * torch.randn(x.shape, generator=numbers)
    t = torch.full((batch,), 900.0 - 200 * step)
    return model_call([x, t, context])


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
