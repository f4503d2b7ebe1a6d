"""Makes MODELs of ours in a real ComfyUI, lets them go, and says what of them is still there; prints JSON.

Owns: each way to make one. Python's search for cycles is off, so what is still there is referred to by something. Run
as `python tests/host/forget_models.py COMFYUI KIND=FILE...`, in a process of its own; no worker is started.
"""

from __future__ import annotations

import gc
import importlib
import json
import sys
import weakref
from typing import Any

from trace_samplers import NAME, load


def parallel_model(path: str, chosen: Any, new_model: Any) -> Any:
    """As Parallel Model Loader makes it."""
    return new_model.remote_patcher(path, "default", chosen)


def parallelized(path: str, chosen: Any, _: Any) -> Any:
    """As Parallelize Model makes it of a stock MODEL."""
    import comfy.sd

    convert = importlib.import_module(f"{NAME}.nodes.host.model.convert_stock_model")
    stock = comfy.sd.load_diffusion_model(path)
    return convert.parallelized(stock, chosen)


WAYS = {"parallelize": parallelized}


def main() -> None:
    """For each kind, the classes of those of its parts that outlive its last clone."""
    comfyui, *arguments = sys.argv[1:]  # which ComfyUI would read
    load(comfyui)
    choice, new_model = (importlib.import_module(f"{NAME}.nodes.{name}") for name in ("choice", "host.model.new_model"))
    devices = importlib.import_module(f"{NAME}.parallel_runtime.devices")
    plan = importlib.import_module(f"{NAME}.parallel_runtime.plan").ParallelPlan.parse("cfg=2")
    chosen = choice.ParallelChoice(devices_text="cpu:2", selection=devices.parse_devices("cpu:2"), plan=plan, shares=())
    left: dict[str, list[str]] = {}
    for argument in arguments:
        kind, _, path = argument.partition("=")
        gc.collect()
        gc.disable()
        patcher = WAYS.get(kind, parallel_model)(path, chosen, new_model)
        clone = patcher.clone()
        parts = [patcher, patcher.model, patcher.model.diffusion_model]
        there = [weakref.ref(each) for each in parts]
        del patcher, clone, parts
        left[kind] = [type(part).__name__ for each in there if (part := each()) is not None]
        gc.enable()
    print(json.dumps(left))  # noqa: T201


if __name__ == "__main__":
    main()
