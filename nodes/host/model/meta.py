"""ComfyUI's layers without weights, for models that keep theirs elsewhere."""

import torch

from ..contract.comfyui import comfy

META = torch.device("meta")


class MetaOperations(comfy.ops.disable_weight_init):
    """ComfyUI's layers, but a plain Linear: under dynamic VRAM ComfyUI's own has no weight for a LoRA to name."""

    class Linear(torch.nn.Linear):
        """A Linear that initialises nothing."""

        def reset_parameters(self) -> None:
            """Weights on the meta device have no values."""
