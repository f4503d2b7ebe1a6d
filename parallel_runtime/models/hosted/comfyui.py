"""ComfyUI's own packages in a worker: found where the host says, told the host's options, imported once.

Owns the import and its order: the device and the options are chosen before it; the attention function, the order of
torch's kernels, what makes scales and what multiplies past a layer are replaced after it and before any model's file.
Imports no custom nodes, and nothing of ComfyUI outside `comfy`, as block_hooks.py does for a MODEL that has such
patches.
"""

import importlib
import os
import sys

import torch

from ...checkpoint import ComfyUI
from ...choices import card_choice
from ...packages import imported_packages
from ...wire.replies import Imported
from . import attention, scales, sdpa, side_branches
from .options import apply_options

# At most one, and the options that it did not take: modules are the process's.
_IMPORTED: list[tuple[ComfyUI, tuple[str, ...]]] = []


def import_comfyui(comfyui: ComfyUI | None, device: torch.device, *, shared: bool = True) -> None:
    """Import ComfyUI's `comfy`; nothing when it is there. `device` is the one that this process computes on.

    `shared`: its attention function and its scales are replaced by those that ranks share; else all is as in stock.
    Raises `ValueError` when it is not said where ComfyUI lies, when it lies elsewhere, and when another one was
    imported.
    """
    if comfyui is None:
        raise ValueError("this model needs ComfyUI's own modules; say where ComfyUI lies (--comfyui PATH)")
    if _IMPORTED:
        if _IMPORTED[0][0] != comfyui:
            raise ValueError(
                f"this worker runs ComfyUI of {_IMPORTED[0][0].path} and was asked for that of {comfyui.path}, or for "
                "other options; release the pool, then run again"
            )
        return
    if not os.path.isfile(os.path.join(comfyui.path, "comfy", "model_base.py")):
        raise ValueError(f"{comfyui.path} has no comfy/model_base.py; name the folder that ComfyUI's main.py lies in")
    if device.type == "cuda":
        torch.cuda.set_device(device)  # ComfyUI takes the current one, and must touch no other
    sys.path.insert(0, comfyui.path)  # as ComfyUI's own process has it, which runs main.py from there
    cli = importlib.import_module("comfy.cli_args")
    left_out = apply_options(cli.parser, cli.args, comfyui.options, cpu=device.type == "cpu")
    importlib.import_module("comfy.ldm.modules.attention")
    if shared:
        attention.install()
        scales.install()
    if shared:
        ops = importlib.import_module("comfy.ops")
        sdpa.put_first(ops, card_choice(device))
        sdpa.try_first(device)
        side_branches.call_layers(ops)
    for name in ("comfy.model_base", "comfy.model_detection", "comfy.supported_models", "comfy.ops", "comfy.utils"):
        importlib.import_module(name)
    _IMPORTED.append((comfyui, left_out))


def what_was_imported() -> Imported:
    """What a rank tells of itself; it may have needed nothing of ComfyUI's so far."""
    return Imported(left_out=_IMPORTED[0][1] if _IMPORTED else (), packages=imported_packages())
