"""A file of Flux.1 weights, recognised by its header: what stands for it in ComfyUI, and what the planner knows of it.

Reads no weights. Does not own the MODEL that is made of it (flux_model.py).
"""

import os
from collections import Counter
from dataclasses import dataclass

import torch

from ...parallel_runtime.checkpoint import CheckpointHeader, ModelSpec, read_header
from ...parallel_runtime.devices import Device
from ...parallel_runtime.models.flux.config import FluxConfig, file_names
from ...parallel_runtime.models.flux.family import FluxModel
from ...parallel_runtime.models.hosted.dtypes import loaded_dtypes
from ...parallel_runtime.planner.automatic import usual_work
from ...parallel_runtime.planner.shapes import ModelShape, Work
from ...parallel_runtime.torch_flags import read_flags
from ...parallel_runtime.weights.model_file import weight_bytes
from .comfyui import BASE, comfy
from .meta import META, MetaOperations
from .pooled_model import WeightSizes

HEAD_DIM = 128  # the only one ComfyUI's Flux knows


@dataclass(frozen=True, kw_only=True)
class Source:
    """A file as it was recognised: sizes, ComfyUI's own description, identity, and bytes of its weights."""

    config: FluxConfig
    model_config: BASE
    spec: ModelSpec
    sizes: WeightSizes

    @property
    def num_heads(self) -> int:
        """Heads of its attention."""
        return self.config.num_heads

    @property
    def shape(self) -> ModelShape:
        """The sizes as the planner takes them."""
        return FluxModel(self.config).shape(os.path.basename(self.spec.path))

    @property
    def work(self) -> Work:
        """The image a plan is chosen for, in the dtype the workers compute in, with weights as a rank keeps them."""
        computed_in: torch.dtype = getattr(torch, self.spec.dtype)
        weight_bytes = max(1, round(self.sizes.total / self.shape.params))
        return usual_work(element_bytes=computed_in.itemsize, weight_bytes=weight_bytes)


def read_source(path: str, weight_dtype: str, devices: tuple[Device, ...]) -> Source:
    """Recognise the file at `path`.

    `weight_dtype` is what the workers compute in; `default` is what ComfyUI would choose for this file on `devices`.
    Raises `ValueError` when the file is missing, broken or no Flux.1.
    """
    header = read_header(path)
    config = FluxConfig.from_header(header)
    weights = _without_values(header, config)
    model_config = _detect(header, config, weights)
    device = torch.device(devices[0].kind, None if devices[0].kind == "cpu" else devices[0].index)
    dtype, _ = loaded_dtypes(weight_dtype, weights, model_config, device)
    model_config.set_inference_dtype(dtype, None)
    model_config.custom_operations = MetaOperations
    return Source(
        config=config,
        model_config=model_config,
        spec=ModelSpec.of(path, str(dtype).removeprefix("torch."), flags=read_flags()),
        sizes=_sizes(header, config, dtype),
    )


def _sizes(header: CheckpointHeader, config: FluxConfig, dtype: torch.dtype) -> WeightSizes:
    blocks: Counter[tuple[str, ...]] = Counter()
    for name, stored in file_names(header, config.prefix, config.expected_shapes()).items():
        blocks[tuple(name.split(".")[:2])] += weight_bytes(header, {name: stored}, dtype)
    return WeightSizes(total=blocks.total(), biggest_block=max(blocks.values()))


def _without_values(header: CheckpointHeader, config: FluxConfig) -> dict[str, torch.Tensor]:
    """The transformer's weights by ComfyUI's names, on the meta device."""
    return {
        name.removeprefix(config.prefix): torch.empty(entry.shape, dtype=entry.dtype, device=META)
        for name, entry in header.tensors.items()
        if name.startswith(config.prefix)
    }


def _detect(header: CheckpointHeader, config: FluxConfig, weights: dict[str, torch.Tensor]) -> BASE:
    if config.head_dim != HEAD_DIM:
        raise ValueError(f"{header.path}: heads of {config.head_dim}; ComfyUI takes only {HEAD_DIM}, use a Flux.1 file")
    model_config = comfy.model_detection.model_config_from_unet(weights, "")
    if model_config is None or model_config.unet_config["image_model"] != "flux":
        raise ValueError(f"{header.path}: ComfyUI does not recognise this file as Flux.1; use a Flux.1 file")
    return model_config
