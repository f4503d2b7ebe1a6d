"""What ComfyUI's models have in common whose transformer computes in the workers."""

from typing import Protocol

import torch

from ...parallel_runtime.weight_patch import WeightPatchSet
from .pooled_model import PooledModel
from .run_context import CallProver


class RemoteModel(Protocol):
    """One of ComfyUI's `BaseModel`s with every weight on the meta device.

    `diffusion_model.outside_runs` is the context of calls that come without a run. `prover` says whether plans compute
    what one device does.
    """

    pooled: PooledModel
    prover: CallProver
    device: torch.device | None
    diffusion_model: torch.nn.Module
    model_loaded_weight_memory: int
    current_weight_patches_uuid: object

    def take_shapes(self, patches: WeightPatchSet) -> None:
        """Give the weights here the shapes that those in the workers have with these patches: ComfyUI reads shapes."""
