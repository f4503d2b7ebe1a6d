"""Runs every case whole and shared, in ranks over gloo: `python -m models.ranks COMFYUI FOLDER RANKS...`.

ComfyUI is imported once and every case is run whole once; then each number of ranks is forked from there. A case that
fails ends no other: the ranks are forked anew for those after it. Writes into FOLDER:

- RANKS.json, a row for each case: relative error, that of the negative control, or why it failed;
- left_out.json, cases that ComfyUI itself cannot run, and those whose class has no plan;
- checks-RANKS-RANK.json, what each check of checks.py found on a rank;
- given.json, for each case the layers that are given the tensor of the layer before (shared_inputs.py);
- loras.json, for the first case of each class how LoRAs beside its layers differ from merged ones (lora_layers.py);
- classes.json, what ComfyUI's list of models has (supported.py).
"""

from __future__ import annotations

import copy
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel_runtime.parallel.attention import SequenceParallelAttention
from parallel_runtime.parallel.collectives import Axis

from .gloo_group import GlooGroup, OwnTokensOnly, chunks_of
from .shared_inputs import Found, watched

CHUNKS = (1, 2, 3)  # into which heads are sent, where ranks have as many


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
    """A case shared: twice, with heads in one chunk and in more, then without exchange, then whole again."""
    from parallel_runtime.models.hosted.hooks import SharedModel
    from parallel_runtime.models.specs import spec_of

    group = GlooGroup()
    shared = SharedModel(model, spec_of(type(model)), group)
    error = max(difference(call(model, inputs), want) for _ in range(2))
    gathers = group.attentions
    axis = Axis("ulysses", group.parts, group.index, dist.group.WORLD)
    outputs, exchanges = [], []
    for number in CHUNKS:
        axis.traffic.reset()
        shared.group = SequenceParallelAttention(ulysses=axis, chunks=partial(chunks_of, number))
        outputs.append(call(model, inputs))
        exchanges.append(axis.traffic.calls)
    shared.group = OwnTokensOnly()
    control = difference(call(model, inputs), want)
    shared.active = False
    whole = difference(call(model, inputs), want)
    shared.remove()
    return {
        "error": max(error, difference(outputs[0], want)),
        "control": control,
        "whole": whole,
        "attentions": gathers,
        "chunks": all(torch.equal(outputs[0], each) for each in outputs[1:]),
        "exchanges": exchanges,
    }


def run_checks() -> dict[str, str]:
    """Check -> what was wrong on this rank, "" when nothing was."""
    from . import (  # noqa: F401  which add to them
        checks_build,
        checks_keeper,
        checks_kept,
        checks_layouts,
        checks_patches,
        checks_unets,
        checks_whole,
        checks_words,
    )
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


def rank_main(rank: int, ranks: int, folder: Path, cases: dict[str, tuple[Any, Any, Any]], *, checks: bool) -> None:
    """One rank: every case, in order, then all checks. Rank 0 writes a row for each case, whichever rank fails."""
    path = folder / f"{ranks}.json"
    rows = json.loads(path.read_text()) if path.exists() else {}
    with torch.inference_mode():
        for name, (model, inputs, want) in cases.items():
            try:
                rows[name] = compare(model, inputs, want)
            except Exception as error:
                said = {"name": name, "failed": f"rank {rank} of {ranks}: {type(error).__name__}: {error}"}
                (folder / f"failed-{rank}").write_text(json.dumps(said))
                raise RuntimeError(f"{name}, rank {rank} of {ranks}") from error
            if rank == 0:
                path.write_text(json.dumps(rows))
        if checks:
            (folder / f"checks-{ranks}-{rank}.json").write_text(json.dumps(run_checks()))


def run_cases(ranks: int, folder: Path, cases: dict[str, tuple[Any, Any, Any]], *, checks: bool) -> bool:
    """Run all cases in forked ranks; after one that fails, the next ones in new ranks. Whether the last ended well."""
    path, left = folder / f"{ranks}.json", dict(cases)
    while True:
        for marker in folder.glob("failed-*"):
            marker.unlink()
        (folder / f"meet{ranks}").unlink(missing_ok=True)
        well = fork_ranks(ranks, folder, partial(rank_main, ranks=ranks, folder=folder, cases=left, checks=checks))
        names = list(left)
        said = [json.loads(marker.read_text()) for marker in folder.glob("failed-*")]
        if well or not said:
            return well
        first = min(said, key=lambda each: names.index(each["name"]))  # what other ranks say follows from it
        rows = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(rows | {first["name"]: {"failed": first["failed"]}}))
        left = {name: left[name] for name in names[names.index(first["name"]) + 1 :]}


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
    from parallel_runtime.models.specs import find_spec

    from .cases import CASES

    cases = {}
    with torch.inference_mode():
        for name in names or CASES:
            model, inputs = CASES[name]()
            plan = find_spec(type(model))
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
    from parallel_runtime.models.specs import spec_of

    from .cases import CASES

    cases: dict[str, tuple[Any, Any, Any]] = {}
    given: dict[str, Found] = {}
    left_out: dict[str, dict[str, str]] = {"stock fails": {}, "refused": {}}
    with torch.inference_mode():
        for name, make in CASES.items():
            if only in name:
                try:
                    model, inputs = make()
                    with watched(model) as given[name]:
                        cases[name] = (model, inputs, call(model, inputs))
                except Exception as error:  # noqa: BLE001  whatever this ComfyUI's class raises for the case
                    left_out["stock fails"][name] = f"{type(error).__name__}: {error}"
    for name in list(cases):
        try:
            spec_of(type(cases[name][0]))
        except ValueError as error:
            left_out["refused"][name] = str(error)
            del cases[name]
    (folder / "left_out.json").write_text(json.dumps(left_out))
    (folder / "given.json").write_text(json.dumps({name: asdict(each) for name, each in given.items()}))
    if not only:
        from .lora_layers import beside_and_merged
        from .supported import found

        firsts = {type(model): (name, model, inputs) for name, (model, inputs, _) in reversed(cases.items())}
        with torch.inference_mode():
            loras = {name: beside_and_merged(model, inputs) for name, model, inputs in firsts.values()}
        (folder / "loras.json").write_text(json.dumps(loras))
        (folder / "classes.json").write_text(json.dumps(found({name: each[0] for name, each in cases.items()})))
    well = [run_cases(ranks, folder, cases, checks=not only) for ranks in numbers]
    return 0 if all(well) else 1


if __name__ == "__main__":
    sys.exit(
        main(sys.argv[1], Path(sys.argv[2]), [int(each) for each in sys.argv[3].split(",")], "".join(sys.argv[4:]))
    )
