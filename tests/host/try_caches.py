"""Tries what our ranks know of EasyCache and LazyCache beside a real ComfyUI's; prints JSON.

Owns: the changed caches. Run as `python tests/host/try_caches.py COMFYUI`, in a process of its own, as trace_samplers.
"""

import importlib
import json
import sys
from types import FunctionType, ModuleType
from typing import Any

from trace_samplers import NAME, load

WRAPPERS = {"EasyCacheHolder": "easycache_forward_wrapper", "LazyCacheHolder": "lazycache_predict_noise_wrapper"}
# Other versions of ComfyUI's functions, by what their source has in place of a part of it.
CHANGED = {
    "the estimate is not summed up": (".cumulative_change_rate += approx", ".cumulative_change_rate = approx"),
    "what goes in is left alone": (".apply_cache_diff(x, uuids)", ".apply_cache_diff(x.clone(), uuids)"),
    "all sides have the first one's": (".apply_cache_diff(x, uuids)", ".apply_cache_diff(x, uuids[:1] * len(uuids))"),
    "the rate is halved": ("output_change / input_change", "output_change / input_change / 2"),
}  # fmt: skip


def changed(module: ModuleType, name: str, old: str, new: str) -> Any:
    """A function of the module with another source; None where its source has not that part."""
    import inspect

    source = inspect.getsource(getattr(module, name))
    if old not in source:
        return None
    inside = dict(vars(module))
    exec(source.replace(old, new), inside)  # noqa: S102
    assert isinstance(inside[name], FunctionType)
    return inside[name]


def main() -> None:
    """What is known of each cache, and of each that was changed."""
    load(sys.argv[1])
    module = importlib.import_module("comfy_extras.nodes_easycache")
    caches = importlib.import_module(f"{NAME}.nodes.host.sampling.stock_caches")
    found: dict[str, Any] = {}
    for kind, wrapper in WRAPPERS.items():
        found[kind] = caches._tried(getattr(module, kind), getattr(module, wrapper), 8, False)
        for what, parts in CHANGED.items():
            if (other := changed(module, wrapper, *parts)) is not None:
                found[f"{kind}: {what}"] = caches._tried(getattr(module, kind), other, 8, False)
    print(json.dumps(found))  # noqa: T201


if __name__ == "__main__":
    main()
