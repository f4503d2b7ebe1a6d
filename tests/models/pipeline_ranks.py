"""Runs cases in stages, in ranks over gloo: `python -m models.pipeline_ranks COMFYUI FOLDER 2,4 [NAME ...]`.

Two ranks are two stages; four are two stages of two ranks, by ulysses and by ring. Writes FOLDER/RANKS-KIND.json, a row
for each case whose plan has stages, by its name: what pipelines.py compares. Without names, all cases.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .ranks import call, run_some

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


if __name__ == "__main__":
    sys.exit(run_some(sys.argv[1:], lambda plan: not plan.one_stage, rank_main))
