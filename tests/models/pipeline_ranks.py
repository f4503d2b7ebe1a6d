"""Runs cases in stages, in ranks over gloo: `python -m models.pipeline_ranks COMFYUI FOLDER 2,4 [NAME ...]`.

Two ranks are two stages; four are two stages of two ranks, by ulysses and by ring. Writes FOLDER/RANKS-KIND.json, a row
for each case whose plan has stages, by its name: what pipelines.py compares. Without names, all cases.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .ranks import call, fork_ranks, start_comfyui

PATCHES = 3
FEW = "Flux.1, 3 tokens of text and 3 of image"  # a token a patch, so none for each of two ranks


def rank_main(rank: int, ranks: int, folder: Path, cases: dict[str, tuple[Any, Any]]) -> None:
    """One rank: every case, in order; the last rank writes."""
    from .pipelines import axes_of, compare

    parts = ranks // 2
    groups = [dist.new_group(list(range(first, first + parts))) for first in range(0, ranks, parts)]
    for kind in ("ulysses", "ring") if parts > 1 else ("ulysses",):
        rows = {}
        for name, (model, inputs) in cases.items():
            if parts > 1 and name == FEW:
                continue
            try:
                with torch.inference_mode():
                    rows[name] = compare(model, inputs, call, patches=PATCHES, axes=axes_of(parts, kind, groups))
            except Exception as error:
                raise RuntimeError(f"{name}, rank {rank} of {ranks}, {kind}") from error
        if rank == ranks - 1:
            (folder / f"{ranks}-{kind}.json").write_text(json.dumps(rows))


def main(comfyui: str, folder: Path, numbers: list[int], names: list[str]) -> int:
    """Everything. Returns 0 when all ranks ended well."""
    torch.set_num_threads(1)
    start_comfyui(comfyui)
    from parallel_runtime.models.plans import find_plan

    from .cases import CASES

    cases = {}
    with torch.inference_mode():
        for name in names or CASES:
            model, inputs = CASES[name]()
            plan = find_plan(type(model))
            if plan is not None and not plan.one_stage:
                cases[name] = (model, inputs)
    well = [fork_ranks(ranks, folder, partial(rank_main, ranks=ranks, folder=folder, cases=cases)) for ranks in numbers]
    return 0 if all(well) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), [int(each) for each in sys.argv[3].split(",")], sys.argv[4:]))
