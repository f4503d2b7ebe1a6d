"""Which module mixes tokens: a reason for what no plan describes."""

import torch

from .probe import ModuleProbe
from .record import CallWatch, Tap
from .values import copied, moved, nudged, tensors, with_leaf


def first_mixing(probe: ModuleProbe, tap: Tap) -> str:
    """The innermost module of a block that ends first with all rows moved, where one row of its argument moved."""
    call = probe.call
    tokens = max((view.shape[2] for key, view in probe.base.items() if key[0] == "q"), default=0)
    for name, value in call.args.items():
        for at, leaf in tensors(value):
            for dim in (each for each, size in enumerate(leaf.shape) if size == tokens > 1):
                key = call.keys[name]
                args, kwargs = list(call.positional), dict(call.named)
                runs = []
                for other in (leaf, nudged(leaf, dim, tokens // 2)):
                    holder = args if isinstance(key, int) else kwargs
                    holder[key] = with_leaf(value, at, other)
                    watch = CallWatch()
                    with torch.inference_mode(), watch.of(call.module), tap(watch.by_rows):
                        call.module(*copied(tuple(args)), **copied(kwargs))
                    runs.append(watch.calls)
                for before, after in zip(*runs, strict=False):
                    if any(True for _ in before.module.children()):
                        continue
                    for (_, one), (_, two) in zip(tensors(before.out), tensors(after.out), strict=False):
                        for dims in (each for each, size in enumerate(one.shape) if size == tokens):
                            if len(moved(one, two, dims) or ()) > 1:
                                where = f"{call.path}.{before.path}".rstrip(".")
                                return f"{where} ({type(before.module).__name__}) mixes tokens"
    return "tokens are mixed in code of its own"
