"""A file of a model of any family, as ComfyUI recognises it, and by which options this ComfyUI computes it.

Does not own the MODEL that is made of it (hosted_model.py).
"""

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import comfy.cli_args
import comfy.model_base
import torch

from ...parallel_runtime.checkpoint import HOSTED, ComfyUI, ModelSpec, read_header
from ...parallel_runtime.devices import Device
from ...parallel_runtime.models.hosted.build import Recognised, recognise
from ...parallel_runtime.models.hosted.dtypes import compute_dtype
from ...parallel_runtime.weights.mapped_file import MappedFile
from .meta import MetaOperations
from .pooled_model import WeightSizes

# Options of ComfyUI's command line that change what a module computes, and with which attention function.
FLAGS = (
    *("use_split_cross_attention", "use_quad_cross_attention", "use_pytorch_cross_attention", "use_sage_attention"),
    *("use_flash_attention", "disable_xformers", "force_upcast_attention", "dont_upcast_attention", "deterministic"),
    *("force_fp32", "force_fp16", "supports_fp8_compute", "force_channels_last"),
)


@dataclass(frozen=True, kw_only=True)
class HostedSource:
    """A file as ComfyUI recognised it: its own description, identity, bytes of weights, heads where it says them."""

    recognised: Recognised
    spec: ModelSpec
    sizes: WeightSizes
    num_heads: int


def read_hosted(path: str, weight_dtype: str, devices: tuple[Device, ...]) -> HostedSource:
    """Recognise the file at `path` as ComfyUI does; arguments as the reader's of a model of our own blocks.

    Raises `ValueError` when the file is missing or broken, or no diffusion model that ComfyUI knows.
    """
    header = read_header(path)
    file = MappedFile(ModelSpec.of(path))
    tensors = {name: file.tensor(entry) for name, entry in header.tensors.items()}
    recognised = recognise(path, tensors, header.metadata)
    device = torch.device(devices[0].kind, None if devices[0].kind == "cpu" else devices[0].index)
    dtype = compute_dtype(weight_dtype, recognised.weights, recognised.config, device)
    recognised.config.set_inference_dtype(dtype, None)
    recognised.config.custom_operations = MetaOperations
    name = str(dtype).removeprefix("torch.")
    unet_config = recognised.config.unet_config
    return HostedSource(
        recognised=recognised,
        spec=ModelSpec.of(path, name, adapter=HOSTED, comfyui=this_comfyui()),
        sizes=_sizes(recognised.weights),
        num_heads=next((unet_config[key] for key in ("num_heads", "num_attention_heads") if key in unet_config), 1),
    )


def this_comfyui() -> ComfyUI:
    """The ComfyUI that this process runs, and the options by which its modules compute."""
    arguments = vars(comfy.cli_args.args)
    options = [f"--{name.replace('_', '-')}" for name in FLAGS if arguments.get(name)]
    fast = arguments.get("fast")
    if fast:
        options += ["--fast", *sorted(each.value for each in fast)]
    return ComfyUI(os.path.dirname(os.path.dirname(os.path.abspath(comfy.model_base.__file__))), tuple(options))


def _sizes(weights: Mapping[str, torch.Tensor]) -> WeightSizes:
    blocks: Counter[tuple[str, ...]] = Counter()
    for name, weight in weights.items():
        blocks[tuple(name.split(".")[:2])] += weight.nbytes
    return WeightSizes(total=blocks.total(), biggest_block=max(blocks.values()))
