"""Runs cases with a first-block cache, in ranks: `python -m models.step_cache_ranks COMFYUI FOLDER 1,2 [NAME ...]`.

Writes FOLDER/RANKS-RANK.json, a row for each case whose plan says what blocks hand on, by its name: how far a call that
skips is from one process in which its blocks are replaced by functions, and from the model itself. What the blocks add
is found by hooks of torch, block by block. Shares nothing with the cache but the plan's words.
"""

from __future__ import annotations

import inspect
import json
import math
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .ranks import call, run_some

STEPS = (0.0, 0.2, 0.25)  # how far the latent of each call is from the first one's


def flat(value: Any) -> list[Any]:
    """What is in tuples and lists."""
    return [leaf for each in value for leaf in flat(each)] if isinstance(value, tuple | list) else [value]


def like(value: Any, leaves: list[Any]) -> Any:
    """The same tuples and lists of other leaves."""
    return type(value)(like(each, leaves) for each in value) if isinstance(value, tuple | list) else leaves.pop(0)


def handed(block: nn.Module, names: str | tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments of these names, or numbers."""
    bound = inspect.signature(type(block).forward).bind(block, *args, **kwargs).arguments
    placed = [args[int(name[1:])] if name.startswith("#") else bound[name] for name in flat(names)]
    return placed[0] if isinstance(names, str) else tuple(placed)


def simulated(model: nn.Module, names: dict[str, Any], whole: dict[str, Any], skipping: dict[str, Any]) -> Tensor:
    """What the model makes of `skipping` when each list's last block adds what its blocks had added to `whole`."""
    lists = {path: list(model.get_submodule(path).children()) for path in names}
    lists = {path: blocks for path, blocks in lists.items() if blocks}
    added = additions(model, names, lists, whole)
    skipped = [(path, block) for path, blocks in lists.items() for block in blocks][1:]
    for path, blocks in lists.items():  # the last block of a list adds what those before it in the list had added
        others = [added[block] for block in blocks if (path, block) in skipped]
        sums = [None if None in parts else sum(parts) for parts in map(list, zip(*others, strict=True))]
        for block in blocks[:-1]:
            added[block] = [0.0] * len(added[block])
        added[blocks[-1]] = sums

    def skip(path: str, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = handed(block, names[path], args, kwargs)
        pairs = zip(flat(given), added[block], strict=True)
        return like(given, [None if more is None else leaf + more for leaf, more in pairs])

    for path, block in skipped:
        block.forward = partial(skip, path, block)
    out = call(model, skipping)
    for _, block in skipped:
        del block.forward
    return out


def additions(
    model: nn.Module, names: dict[str, Any], lists: dict[str, list[nn.Module]], inputs: dict[str, Any]
) -> dict[nn.Module, list[Any]]:
    """What each block adds to what it hands on; None for what it does not return."""
    added: dict[nn.Module, list[Any]] = {}

    def before(path: str, block: nn.Module, args: tuple, kwargs: dict) -> None:
        added[block] = [each.clone() for each in flat(handed(block, names[path], args, kwargs))]

    def after(block: nn.Module, _: tuple, out: Any) -> None:
        pairs = zip(flat(out), added[block], strict=True)
        added[block] = [None if new is None else new - old for new, old in pairs]

    handles = []
    for path, blocks in lists.items():
        for block in blocks:
            handles.append(block.register_forward_pre_hook(partial(before, path), with_kwargs=True))
            handles.append(block.register_forward_hook(after))
    call(model, inputs)
    for handle in handles:
        handle.remove()
    return added


def compare(model: nn.Module, inputs: dict[str, Any], group: Any) -> dict[str, float]:
    """Errors and changes of a case over the ranks of `group`."""
    from parallel_runtime.models.hosted.first_block import CachedBlocks, Residuals
    from parallel_runtime.models.hosted.hooks import SharedModel
    from parallel_runtime.models.specs import spec_of

    from .pipelines import moved

    plan = spec_of(type(model))
    modules = dict(model.named_modules())
    names = {path: plan.handed_on(path) for path in plan.staged if path in modules}
    first, second, third = (moved(inputs, amount) for amount in STEPS)
    want, right = simulated(model, names, first, second), call(model, third)
    shared = SharedModel(model, plan, group) if group.parts > 1 else None
    cached = CachedBlocks(model, plan)

    def total(sums: Tensor) -> Tensor:
        return group.gather(sums[None], dim=0, lengths=[1] * group.parts).sum(0)

    def run(given: dict[str, Any], threshold: float, residuals: Any, over: Any = total) -> tuple[Tensor, Any]:
        told = {"threshold": threshold, "total": over, "call_of": lambda: shared and shared.call}
        with cached.calling(residuals, **told) as seen:
            return call(model, given), seen

    def error(out: Tensor, of: Tensor) -> float:
        return float((out - of).norm() / of.norm()) if out.isfinite().all() else math.inf

    kept = Residuals()
    _, cold = run(first, math.inf, kept)
    out, warm = run(second, math.inf, kept)
    held: list[int] = []
    last = [block for path in names for block in model.get_submodule(path).children()][-1]  # a list may be empty
    looking = last.register_forward_pre_hook(lambda *_: held.append(kept.nbytes))
    whole, again = run(third, 0.0, kept)
    looking.remove()
    assert (cold.skips, warm.skips, again.skips) == (False, True, False)
    _, alone = run(second, 0.0, kept, lambda sums: sums)
    return {
        "skipped": error(out, want),
        "whole": error(whole, right),
        "visible": error(out, call(model, second) if shared is None else run(second, 0.0, Residuals())[0]),
        "change": warm.change,
        "alone": alone.change,
        "held": max(held),
        "kept": kept.nbytes,
    }


def rank_main(rank: int, ranks: int, folder: Path, cases: dict[str, tuple[Any, Any]]) -> None:
    """One rank: every case, in order."""
    from parallel_runtime.parallel.attention import SequenceParallelAttention

    from .pipelines import axes_of

    group = SequenceParallelAttention(**axes_of(ranks, "ulysses", [dist.group.WORLD]))
    rows = {}
    for name, (model, inputs) in cases.items():
        try:
            with torch.inference_mode():
                rows[name] = compare(model, inputs, group)
        except Exception as error:
            raise RuntimeError(f"{name}, rank {rank} of {ranks}") from error
    (folder / f"{ranks}-{rank}.json").write_text(json.dumps(rows))


if __name__ == "__main__":
    sys.exit(run_some(sys.argv[1:], lambda plan: not plan.unchained and not plan.whole, rank_main))
