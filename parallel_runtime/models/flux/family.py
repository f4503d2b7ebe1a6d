"""What the rest of the runtime asks of Flux.1: of the family, and of one of its files (models/family.py).

Owns which of a step's tensors ComfyUI rounds. The sizes, the arithmetic and
the checks of a step are this folder's other files'.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from ...checkpoint import CheckpointHeader, TensorEntry
from ...plan import ParallelPlan, heads_error, stages_error
from .adapter import FluxAdapter
from .config import FluxConfig, file_names, file_scales, is_flux, is_in_a_format_of_comfyui, own_tensors
from .sample import sample_config, write_sample

if TYPE_CHECKING:
    from .reference import ReferenceModel

# ComfyUI rounds neither the timestep nor what its model makes itself, nor a ControlNet's residuals.
AS_GIVEN = frozenset({"timesteps", "img_ids", "txt_ids", "control_in", "control_out"})


@dataclass(frozen=True)
class FluxModel:
    """A Flux.1 of these sizes."""

    config: FluxConfig

    @cached_property
    def adapter(self) -> FluxAdapter:
        """Its blocks."""
        return FluxAdapter(self.config)

    def names(self, header: CheckpointHeader) -> dict[str, str]:
        """Where each of its weights stands in the file: our name to the file's."""
        return file_names(header, self.config.prefix, self.config.expected_shapes())

    def scales(self, header: CheckpointHeader, names: Mapping[str, str]) -> dict[str, str]:
        """Where the scale of each fp8 weight stands: our name of the weight to the file's of the scale."""
        return file_scales(header, names)

    def matrix_bytes(self, header: CheckpointHeader) -> int:
        """Bytes of a number of the file's matrices."""
        return header.tensors[f"{self.config.prefix}double_blocks.0.img_attn.qkv.weight"].dtype.itemsize

    def check_plan(self, plan: ParallelPlan) -> None:
        """Raise `ValueError` when the plan cannot split this model."""
        heads, blocks = self.config.num_heads, self.config.depth + self.config.depth_single
        reason = heads_error(plan.ulysses, heads) or stages_error(plan.pipefusion, blocks)
        if reason is not None:
            raise ValueError(reason)

    def cast_inputs(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """A step's tensors as ComfyUI rounds them for a model that computes in `dtype`.

        Those are the latent with what is concatenated to it, the text, y, the guidance and a mask of numbers. Source:
        ComfyUI, `BaseModel._apply_model`.
        """
        return {
            name: tensor.to(dtype) if tensor.is_floating_point() and name.partition(".")[0] not in AS_GIVEN else tensor
            for name, tensor in tensors.items()
        }

    def write_sample(self, path: str | os.PathLike[str]) -> None:
        """Write a file of these sizes, of random weights."""
        write_sample(path, self.config)


class FluxFamily:
    """Flux.1 (dev, schnell, Fill, Kontext)."""

    title = "Flux.1"

    def recognises(self, header: CheckpointHeader) -> bool:
        """Whether this is a Flux.1, be it damaged; not one in a format that ComfyUI's own layers alone compute in."""
        return is_flux(header) and not is_in_a_format_of_comfyui(header)

    def weights(self, header: CheckpointHeader) -> dict[str, TensorEntry]:
        """What a file has of the transformer, by the file's names."""
        return own_tensors(header)

    def read(self, header: CheckpointHeader) -> FluxModel:
        """The model in a file. Raises `ValueError` when it holds no Flux.1 that can be read."""
        return FluxModel(FluxConfig.from_header(header))

    def sample(self, *, heads: int = 24, head_dim: int = 32, depth: int = 1, depth_single: int = 1) -> FluxModel:
        """A small model for checks that have none; any plan of up to eight ranks can split the usual one."""
        return FluxModel(sample_config(heads=heads, head_dim=head_dim, depth=depth, depth_single=depth_single))

    def reference(self) -> "type[ReferenceModel]":
        """The class of the reference model, which imports diffusers."""
        from .reference import ReferenceModel

        return ReferenceModel


FLUX = FluxFamily()
