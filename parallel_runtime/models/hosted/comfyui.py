"""ComfyUI's own packages in a worker: found where the host says, told the host's options, imported once.

Owns the import and its order: the device is chosen before it, the attention function and what makes scales are replaced
after it and before any model's file. Imports no custom nodes, and nothing of ComfyUI outside `comfy`, as
block_patches.py does for a MODEL that has such patches.
"""

import importlib
import os
import sys

import torch

from ...checkpoint import ComfyUI
from . import attention, scales

_IMPORTED: list[ComfyUI] = []  # at most one: modules are the process's


def import_comfyui(comfyui: ComfyUI | None, device: torch.device, *, shared: bool = True) -> None:
    """Import ComfyUI's `comfy`; nothing when it is there. `device` is the one that this process computes on.

    `shared`: its attention function and its scales are replaced by those that ranks share; else all is as in stock.
    Raises `ValueError` when nobody said where ComfyUI lies, when it lies elsewhere, and when another one was imported.
    """
    if comfyui is None:
        raise ValueError("this model needs ComfyUI's own modules; say where ComfyUI lies (--comfyui PATH)")
    if _IMPORTED:
        if _IMPORTED[0] != comfyui:
            raise ValueError(
                f"this worker runs ComfyUI of {_IMPORTED[0].path} and was asked for that of {comfyui.path}, or for "
                "other options; release the pool, then run again"
            )
        return
    if not os.path.isfile(os.path.join(comfyui.path, "comfy", "model_base.py")):
        raise ValueError(f"{comfyui.path} has no comfy/model_base.py; name the folder that ComfyUI's main.py lies in")
    if device.type == "cuda":
        torch.cuda.set_device(device)  # ComfyUI takes the current one, and must touch no other
    sys.path.append(comfyui.path)
    sys.argv = ["comfyui", *(["--cpu"] if device.type == "cpu" else []), *comfyui.options]
    importlib.import_module("comfy.options").enable_args_parsing()
    importlib.import_module("comfy.ldm.modules.attention")
    if shared:
        attention.install()
        scales.install()
    for name in ("comfy.model_base", "comfy.model_detection", "comfy.supported_models", "comfy.ops", "comfy.utils"):
        importlib.import_module(name)
    _IMPORTED.append(comfyui)
