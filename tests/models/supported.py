"""What ComfyUI's list of models is made of: the transformer or U-Net of each class of `comfy.supported_models.models`.

Each class of the list makes its model on the meta device, as ComfyUI's loader has it do, with too few sizes for most;
what `BaseModel` was then about to build is read from its frame. `python -m models.supported COMFYUI` prints that, and
what each case of cases_*.py builds, as JSON.

Owns: what is asked of ComfyUI. Does not own: the page (tools/class_list.py), nor the test (test_supported.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
# What some classes look up before they build anything.
SIZES = {"in_channels": 4, "hidden_size": 2604, "dim": 2000}

Found = dict[str, Any]  # "version", "classes": name -> {"path", "refused"}, "cases": name -> path


def path_of(kind: type) -> str:
    """The dotted path of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"


class AnyTensor(dict[str, Tensor]):
    """A state dict that has whatever is looked up."""

    def __missing__(self, name: str) -> Tensor:
        return torch.empty(1, 1, device="meta")


def transformer_of(described: type) -> type:
    """The class of the module that a class of the list has made. Raises RuntimeError for one that makes none."""
    import comfy.model_base

    try:
        config = described({**SIZES, **described.unet_config})
        return type(config.get_model(AnyTensor(), "", device="meta").diffusion_model)
    except Exception as error:  # whatever a class raises for sizes that it lacks
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if frame.f_code is comfy.model_base.BaseModel.__init__.__code__:
                return frame.f_locals["unet_model"]
        raise RuntimeError(f"{described.__name__} of supported_models makes no model: {error!r}") from error


def refusal(kind: type) -> str:
    """What is said of a class that ranks are to share the tokens of; "" where it has a plan."""
    from parallel_runtime.models.specs import not_sampled, spec_of

    try:
        spec_of(kind)
    except ValueError as error:
        return not_sampled(kind) or str(error)
    return ""


def found(cases: dict[str, nn.Module]) -> Found:
    """What this process's ComfyUI has; and the classes of these cases."""
    import comfy.supported_models
    import comfyui_version

    kinds = {each.__name__: transformer_of(each) for each in comfy.supported_models.models}
    return {
        "version": comfyui_version.__version__,
        "classes": {name: {"path": path_of(kind), "refused": refusal(kind)} for name, kind in kinds.items()},
        "cases": {name: path_of(type(module)) for name, module in cases.items()},
    }


def ask() -> Found:
    """The same, from a process of its own."""
    from host.fetch import comfyui_path

    command = [sys.executable, "-m", "models.supported", str(comfyui_path())]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    if done.returncode:
        raise RuntimeError(f"ComfyUI's list of models could not be read: {done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    from .ranks import start_comfyui

    start_comfyui(sys.argv[1])
    from .cases import CASES

    with torch.inference_mode():
        print("\n" + json.dumps(found({name: make()[0] for name, make in CASES.items()})))  # noqa: T201
