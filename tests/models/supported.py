"""What ComfyUI's list of models is made of: the transformer or U-Net of each class of `comfy.supported_models.models`.

Each class of the list makes its model on the meta device, as ComfyUI's loader has it do, with too few sizes for most;
what `BaseModel` was then about to build is read from its frame.

Owns: what is asked of ComfyUI. Does not own: the page (tools/class_list.py), nor the test (test_supported.py).
"""

import traceback
from contextlib import suppress
from typing import Any
from unittest import mock

import torch
from torch import Tensor

# What some classes look up before they build anything.
SIZES = {"in_channels": 4, "hidden_size": 2604, "dim": 2000}

Found = dict[str, Any]  # "version", "classes": name -> path, "cases": name -> path


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


def found(_: object) -> Found:
    """What this process's ComfyUI has, and the classes of the cases that it can make: run in a rank."""
    import comfy.supported_models
    import comfyui_version

    from . import tiny
    from .cases import CASES

    kinds = {each.__name__: transformer_of(each) for each in comfy.supported_models.models}
    cases = {}
    with mock.patch.object(tiny, "fill", lambda *_, **__: None):  # of a model that nobody calls
        for name, make in CASES.items():
            with suppress(Exception):  # what this ComfyUI cannot make fails where the case is compared
                cases[name] = path_of(type(make()[0]))
    return {
        "version": comfyui_version.__version__,
        "classes": {name: path_of(kind) for name, kind in kinds.items()},
        "cases": cases,
    }
