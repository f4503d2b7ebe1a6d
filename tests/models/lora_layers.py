"""A LoRA on every layer of a class, beside the weights and merged by ComfyUI: what both compute, in one process.

Owns the comparison. A class that used a layer's weight past the layer's forward would lose the LoRA beside it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from parallel_runtime.models.hosted.deltas import MergedDeltas
from parallel_runtime.models.hosted.side_branches import WEIGHT, LowRank, SideBranches, runs_as_branch
from parallel_runtime.weight_delta import WeightDelta

from .tiny import call, difference

CPU = torch.device("cpu")


def loras(model: nn.Module) -> dict[str, WeightDelta]:
    """A LoRA of rank 2 on each weight beside whose layer one can run."""
    numbers, found = torch.Generator().manual_seed(3), {}
    for name, weight in model.named_parameters():
        if not name.endswith(WEIGHT) or weight.ndim < 2:
            continue
        up, down = (
            torch.randn(weight.shape[0], 2, generator=numbers),
            torch.randn(2, *weight.shape[1:], generator=numbers),
        )
        values = (up, down / down[0].numel() ** 0.5, 2.0, None)
        patch = WeightDelta(key=name, kind="lora", strength=0.3, values=values)
        if runs_as_branch(patch, model.get_submodule(name.removesuffix(WEIGHT)), weight):
            found[name] = patch
    return found


def beside_and_merged(model: nn.Module, inputs: dict[str, Any]) -> dict[str, float]:
    """How far the LoRAs beside are from those merged, and how far those move the output. The model stays as it was."""
    deltas, plain, changes, branches = loras(model), call(model, inputs), MergedDeltas(model, {}, None), SideBranches()
    each = {name: [patch] for name, patch in deltas.items()}
    changes.merge(each, device=CPU, cancelled=lambda: False, beat=lambda: None)
    merged = call(model, inputs)
    changes.undo_except(set())
    made = {
        name.removesuffix(WEIGHT): [LowRank.of(patch, model.get_parameter(name), dtype=torch.float32, device=CPU)]
        for name, patch in deltas.items()
    }
    branches.have(model, made)
    beside = call(model, inputs)
    branches.have(model, {})
    return {"error": difference(beside, merged), "moved": difference(plain, merged), "layers": len(made)}
