"""ComfyUI's layers without weights, for models that keep theirs elsewhere, and how what they hold refers to them."""

from weakref import ReferenceType

import torch

from .comfyui import comfy

META = torch.device("meta")


class MetaOperations(comfy.ops.disable_weight_init):
    """ComfyUI's layers, but a plain Linear: under dynamic VRAM ComfyUI's own has no weight for a LoRA to name."""

    class Linear(torch.nn.Linear):
        """A Linear that initialises nothing."""

        def reset_parameters(self) -> None:
            """Weights on the meta device have no values."""


def alive(module: "ReferenceType[torch.nn.Module]") -> torch.nn.Module:
    """The module that a part of it refers to weakly, so that it goes with its last user and not some time later.

    Raises `RuntimeError` where the part was kept longer than the module.
    """
    found = module()
    if found is None:
        raise RuntimeError("a call of a MODEL that is gone; queue the prompt again")
    return found
