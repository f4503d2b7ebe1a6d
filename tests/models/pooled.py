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
from host.tiny_hosted import call, spec_of
from parallel_runtime.checkpoint import ModelSpec
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.pool import Pool

STEPS = 3
TEXTS = (7, 12)  # of the two conditionings, so they are two calls


def write_wan(folder: Path) -> ModelSpec:
    """A Wan of three blocks and five heads, as ComfyUI's modules compute it."""
    models = write_families(folder, only=[WAN.name])
    return spec_of(models / "diffusion_models" / WAN.file)


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
            told = {**made.options, **(options or {}), "place": {"run": run, "key": f"text of {text}"}}
            calls.append(replace(made, options=told))
        found.append(torch.cat(pool.run(spec, plan, calls).outs, 1))
    return found
