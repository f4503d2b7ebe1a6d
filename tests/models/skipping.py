"""A case with a first-block cache in ranks, and what one process makes of it.

How far a call that skips is from one process in which its blocks are replaced by functions, and from the model itself.
What the blocks add is found by hooks of torch, block by block. Shares nothing with the cache but the plan's words.
"""

import inspect
import math
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from parallel_runtime.models.hosted.first_block import CachedBlocks, Residuals
from parallel_runtime.models.hosted.hooks import SharedModel
from parallel_runtime.models.specs import spec_of
from parallel_runtime.parallel.attention import SequenceParallelAttention

from .cases import CASES
from .gloo_group import GlooGroup
from .pipelines import axes_of, moved
from .tiny import call, difference

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


def skipping(ranks: GlooGroup, name: str) -> dict[str, float]:
    """Errors and changes of a case over these ranks."""
    group = SequenceParallelAttention(**axes_of(ranks.parts, "ulysses", [dist.group.WORLD]))
    model, inputs = CASES[name]()
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
        "skipped": difference(out, want),
        "whole": difference(whole, right),
        "visible": difference(out, call(model, second) if shared is None else run(second, 0.0, Residuals())[0]),
        "change": warm.change,
        "alone": alone.change,
        "held": max(held),
        "kept": kept.nbytes,
    }
