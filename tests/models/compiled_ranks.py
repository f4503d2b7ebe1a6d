"""Runs cases with compiled blocks in ranks over gloo: `python -m models.compiled_ranks COMFYUI FOLDER 2 NAME...`.

Each case is called by graphs, then with other lengths of text and sizes of picture, then without exchange, then whole.
Rank 0 writes RANKS.json, a row for each case: errors beside the same call without graphs, and what graphs were made.
"""

from __future__ import annotations

import copy
import inspect
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from parallel_runtime.compiling import compile_environment

from .gloo_group import GlooGroup, OwnTokensOnly
from .ranks import call, run_some

LONGER = {9: 13, 10: 14, 14: 18}  # text tokens, height and width of the cases' latents


def longer(value: Any) -> Any:
    """Another prompt and another size: noise in a tensor's new shape, masks with everything, numbers as they are."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(longer, value))
    if not isinstance(value, Tensor) or not {*value.shape} & {*LONGER}:
        return value
    shape = [LONGER.get(size, size) for size in value.shape]
    if not value.is_floating_point():
        return value.new_ones(shape)
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def largest_difference(got: Tensor, want: Tensor) -> float:
    """Of any number, where outputs are about 1; infinite for another shape."""
    return float((got - want).abs().max()) if got.shape == want.shape else float("inf")


def compare(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    """A case's row."""
    from parallel_runtime.models.hosted.compiled import blocks_of
    from parallel_runtime.models.hosted.graphs import Graphs, Watch
    from parallel_runtime.models.hosted.hooks import SharedModel
    from parallel_runtime.models.hosted.side_branches import SideBranches
    from parallel_runtime.models.specs import spec_of
    from parallel_runtime.timing import RegionTimer

    plan, group = spec_of(type(model)), GlooGroup()
    blocks = blocks_of(model)
    shared = SharedModel(model, plan, group)
    other = {name: longer(value) for name, value in copy.deepcopy(inputs).items()}
    if "transformer_options" in inspect.signature(type(model).forward).parameters:
        other["transformer_options"] = {"sigmas": torch.ones(1), "cond_or_uncond": [0], "patches": {}}
    want, want_longer = call(model, inputs), call(model, other)
    watch = Watch(RegionTimer(torch.device("cpu"), on=False), lambda: None, lambda _: None)
    run = blocks.run(Graphs(), watch, SideBranches().form)
    with run.calling():
        errors, graphs = [largest_difference(call(model, inputs), want)], [run.report().graphs]
        for given, expected in ((other, want_longer), (inputs, want)):
            errors.append(largest_difference(call(model, given), expected))
            graphs.append(run.report().graphs)
        shared.group = OwnTokensOnly()
        control = largest_difference(call(model, inputs), want)
        shared.active = False
        whole = call(model, inputs)
        graphs.append(run.report().graphs)
    report = run.report()
    errors.append(largest_difference(whole, call(model, inputs)))
    shared.remove()
    return {
        "errors": errors,
        "size": float(want.abs().max()),
        "control": control,
        "graphs": graphs,
        "uncompiled": report.uncompiled_blocks,
        "reason": report.reason,
        "kinds": sorted({type(block).__name__ for path in plan.attention for block in _blocks(model, path)}),
        "compile_s": report.compile_s,
    }


def _blocks(model: nn.Module, path: str) -> list[nn.Module]:
    found = dict(model.named_modules()).get(path)
    return [] if found is None else list(found.children())


def rank_main(rank: int, ranks: int, folder: Path, cases: dict[str, tuple[nn.Module, dict[str, Any]]]) -> None:
    """One rank: every case."""
    rows = {}
    with torch.inference_mode():
        for name, (model, inputs) in cases.items():
            rows[name] = compare(model, inputs)
            if rank == 0:
                (folder / f"{ranks}.json").write_text(json.dumps(rows))


if __name__ == "__main__":
    os.environ |= compile_environment(os.environ)
    sys.exit(run_some(sys.argv[1:], lambda plan: True, rank_main))
