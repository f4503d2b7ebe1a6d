"""Runs every case whole and shared, in ranks over gloo: `python -m models.ranks COMFYUI FOLDER RANKS...`.

ComfyUI is imported once and every case is run whole once; then each number of ranks is forked from there. Writes
FOLDER/RANKS.json, a row for each case: relative error, that of the negative control; FOLDER/checks-RANKS-RANK.json,
what each check of checks.py found on a rank; and FOLDER/classes.json, what ComfyUI's list of models has (supported.py).
"""

from __future__ import annotations

import copy
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .gloo_group import GlooGroup, OwnTokensOnly


def start_comfyui(path: str) -> None:
    """Import ComfyUI from a folder as a worker does: no command line but ours, attention replaced first."""
    sys.path.insert(0, path)
    sys.argv = [sys.argv[0], "--cpu", "--use-pytorch-cross-attention"]
    import comfy.options

    comfy.options.enable_args_parsing()
    import comfy.patcher_extension

    from parallel_runtime.models.hosted.attention import install

    install()


def call(model: torch.nn.Module, inputs: dict[str, Any]) -> Tensor:
    """One call, its output flat."""
    given = copy.deepcopy(inputs)
    if hasattr(model, "clear_kv_cache"):  # as the worker before each call
        model.clear_kv_cache()
    out = model(**given)
    return torch.cat([each.flatten() for each in out]) if isinstance(out, (list, tuple)) else out.flatten()


def difference(got: Tensor, want: Tensor) -> float:
    """Relative error; infinite for what is not finite or has another shape."""
    if got.shape != want.shape or not got.isfinite().all():
        return float("inf")
    return float((got - want).norm() / want.norm())


def compare(model: torch.nn.Module, inputs: dict[str, Any], want: Tensor) -> dict[str, Any]:
    """A case shared: twice, then without exchange, then whole again."""
    from parallel_runtime.models.hosted.hooks import SharedModel
    from parallel_runtime.models.plans import plan_for

    group = GlooGroup()
    shared = SharedModel(model, plan_for(type(model)), group)
    error = max(difference(call(model, inputs), want) for _ in range(2))
    gathers = group.attentions
    shared.group = OwnTokensOnly()
    control = difference(call(model, inputs), want)
    shared.active = False
    whole = difference(call(model, inputs), want)
    shared.remove()
    return {"error": error, "control": control, "whole": whole, "attentions": gathers}


def run_checks() -> dict[str, str]:
    """Check -> what was wrong on this rank, "" when nothing was."""
    from . import checks_build, checks_kept, checks_patches, checks_unets, checks_whole, checks_words  # noqa: F401  which add to them
    from .checks import CHECKS
    from .gloo_group import GlooGroup

    found = {}
    for name, check in CHECKS.items():
        try:
            check(GlooGroup())
            found[name] = ""
        except (AssertionError, KeyError, RuntimeError, ValueError):
            found[name] = traceback.format_exc()
    return found


def rank_main(rank: int, ranks: int, folder: Path, cases: dict[str, tuple[Any, Any, Any]], only: str) -> None:
    """One rank: every case, in order; rank 0 writes. All checks, unless `only` some cases are run."""
    rows = {}
    with torch.inference_mode():
        for name, (model, inputs, want) in cases.items():
            try:
                rows[name] = compare(model, inputs, want)
            except Exception as error:
                raise RuntimeError(f"{name}, rank {rank} of {ranks}") from error
            if rank == 0:
                (folder / f"{ranks}.json").write_text(json.dumps(rows))
        if not only:
            (folder / f"checks-{ranks}-{rank}.json").write_text(json.dumps(run_checks()))


def fork_ranks(ranks: int, folder: Path, one: Callable[[int], None]) -> bool:
    """Run `one` in each rank, with a process group that meets in `folder`; returns whether all of them ended well."""
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                dist.init_process_group(
                    "gloo",
                    store=dist.FileStore(str(folder / f"meet{ranks}"), ranks),
                    rank=rank,
                    world_size=ranks,
                    timeout=timedelta(seconds=60),
                )
                one(rank)
                dist.barrier()
                code = 0
            finally:
                if code:
                    traceback.print_exc()
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    return all([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 for child in children])


RankMain = Callable[..., None]  # of a rank, with `ranks`, `folder` and `cases`: a model and its inputs, by name


def run_some(arguments: Sequence[str], takes: Callable[[Any], bool], one: RankMain) -> int:
    """Run `one` in ranks, for the cases whose plan `takes` says yes to: COMFYUI FOLDER RANKS,... [NAME ...].

    Returns 0 when all ranks ended well.
    """
    comfyui, folder, numbers, *names = arguments
    torch.set_num_threads(1)
    start_comfyui(comfyui)
    from parallel_runtime.models.plans import find_plan

    from .cases import CASES

    cases = {}
    with torch.inference_mode():
        for name in names or CASES:
            model, inputs = CASES[name]()
            plan = find_plan(type(model))
            if plan is not None and takes(plan):
                cases[name] = (model, inputs)
    well = [
        fork_ranks(ranks, Path(folder), partial(one, ranks=ranks, folder=Path(folder), cases=cases))
        for ranks in map(int, numbers.split(","))
    ]
    return 0 if all(well) else 1


def main(comfyui: str, folder: Path, numbers: list[int], only: str) -> int:
    """Everything. Returns 0 when all ranks ended well."""
    torch.set_num_threads(1)
    start_comfyui(comfyui)
    from .cases import CASES

    cases = {}
    with torch.inference_mode():
        for name, make in CASES.items():
            if only in name:
                print(name, file=sys.stderr, flush=True)  # noqa: T201  so that a failure says where
                model, inputs = make()
                cases[name] = (model, inputs, call(model, inputs))
    if not only:
        from .supported import found

        (folder / "classes.json").write_text(json.dumps(found({name: each[0] for name, each in cases.items()})))
    well = [
        fork_ranks(ranks, folder, partial(rank_main, ranks=ranks, folder=folder, cases=cases, only=only))
        for ranks in numbers
    ]
    return 0 if all(well) else 1


if __name__ == "__main__":
    sys.exit(
        main(sys.argv[1], Path(sys.argv[2]), [int(each) for each in sys.argv[3].split(",")], "".join(sys.argv[4:]))
    )
