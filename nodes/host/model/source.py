"""A file of a model of any family, as ComfyUI recognises it; which plans it has, and how this ComfyUI computes it.

Does not own the MODEL that is made of it (stand_in.py).
"""

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ....parallel_runtime.checkpoint import COMPUTE_DTYPES, FP8, ComfyUI, ModelSpec, read_header
from ....parallel_runtime.devices import Device
from ....parallel_runtime.mapped_file import MappedFile
from ....parallel_runtime.models.hosted.build import Recognised, recognise
from ....parallel_runtime.models.hosted.calls import takes_whole_batches
from ....parallel_runtime.models.hosted.dtypes import loaded_dtypes
from ....parallel_runtime.models.hosted.formats import widened_formats
from ....parallel_runtime.models.hosted.hook_points import find_hook_points
from ....parallel_runtime.models.hosted.kept_state import keeps_of
from ....parallel_runtime.models.hosted.stage import refuse_stages
from ....parallel_runtime.models.hosted.stock_attention import SPARSE, title_of
from ....parallel_runtime.models.specs import SPECS, ShardingSpec, find_spec, not_sampled, spec_of, why_without
from ....parallel_runtime.models.specs.whole import find_whole
from ....parallel_runtime.plan import ParallelPlan
from ....parallel_runtime.torch_flags import read_flags
from ....parallel_runtime.weights.block_shards import blocks_of
from ....parallel_runtime.wire.protocol import dtype_name
from ..contract.comfyui import comfy, is_absent
from ..contract.like_host import options_for_ranks
from .pooled_model import WeightSizes

# In the name of an attention function of ComfyUI's that computes in int8 or fp8, or leaves out blocks of keys.
ROUNDING = ("sage", "attention3", "int8", SPARSE)
META = torch.device("meta")


class MetaOperations(comfy.ops.disable_weight_init):
    """ComfyUI's layers, but a plain Linear: under dynamic VRAM ComfyUI's own has no weight for a LoRA to name."""

    class Linear(torch.nn.Linear):
        """A Linear that initialises nothing."""

        def reset_parameters(self) -> None:
            """Weights on the meta device have no values."""

        def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ANN401
            """With what stands before and after the product, which ComfyUI's Linear takes from 0.39 on."""
            if not args and not kwargs:
                return super().forward(x)
            act = args or (kwargs.pop("input_act", None),)
            found: torch.Tensor = comfy.ops.linear_input_act(self, x, *act, **kwargs)
            return found


@dataclass(frozen=True, kw_only=True)
class HostedSource:
    """A file as ComfyUI recognised it: its own description, identity, bytes of weights, heads where it says them.

    `found_by` as in `PooledModel`.
    `model` is ComfyUI's on the meta device; `unshared` says why no ranks can share its tokens, "" where they can;
    `whole_batches`: all rows of a call, both sides of cfg among them, are one rank's; `keeps_state` and
    `rounding_attention` and `widened_formats` as in `PooledModel`.
    """

    recognised: Recognised
    model: comfy.model_base.BaseModel
    unshared: str
    whole_batches: bool
    keeps_state: bool
    spec: ModelSpec
    sizes: WeightSizes
    num_heads: int
    rounding_attention: str
    widened_formats: tuple[str, ...]
    found_by: str = ""


def read_hosted(path: str, weight_dtype: str, devices: tuple[Device, ...], *, checkpoint: bool = False) -> HostedSource:
    """Recognise the file at `path` as ComfyUI does.

    `weight_dtype` is what the workers compute in; `default` is what ComfyUI would choose for this file on `devices`.

    `checkpoint`: as Load Checkpoint reads it, which finds more in a file than Load Diffusion Model does.

    Raises `ValueError` when the file is missing or broken, or no diffusion model that ComfyUI knows, and for an unknown
    `weight_dtype`.
    """
    if weight_dtype not in (names := (*COMPUTE_DTYPES, *FP8)):  # of another node, at whose values ComfyUI does not look
        raise ValueError(f"weight_dtype={weight_dtype!r} is unknown; use one of {', '.join(names)}")
    header = read_header(path)
    file = MappedFile(ModelSpec.of(path))
    tensors = {name: file.tensor(entry) for name, entry in header.tensors.items()}
    recognised = recognise(path, tensors, header.metadata, checkpoint=checkpoint)
    device = torch.device(devices[0].kind, None if devices[0].kind == "cpu" else devices[0].index)
    dtype, kept = loaded_dtypes(weight_dtype, recognised.weights, recognised.config, device)
    if kept and recognised.quantised:
        raise ValueError(
            f"weight_dtype={kept}: the layers of {path} are quantised already, and stay as they are; set weight_dtype "
            "to default"
        )
    dtypes = _dtypes(recognised, dtype, kept) if kept else {}
    recognised.config.set_inference_dtype(dtype, None)
    recognised.config.custom_operations = MetaOperations
    name = dtype_name(dtype)
    unet_config = recognised.config.unet_config
    model = recognised.model(META)
    held = dtypes
    on_cpu = device.type == "cpu"
    if not on_cpu and not kept and not recognised.quantised:  # a device has a copy, as ComfyUI's loader's
        held = {name: weight.dtype for name, weight in model.diffusion_model.named_parameters()}
    shared_by = find_spec(model.diffusion_model)
    return HostedSource(
        recognised=replace(recognised, dtypes_kept=dtypes),
        model=model,
        unshared=why_unshared(model.diffusion_model),
        whole_batches=takes_whole_batches(type(model.diffusion_model)),
        spec=ModelSpec.of(
            path,
            name,
            comfyui=this_comfyui(),
            checkpoint=checkpoint,
            flags=read_flags(),
            kept=kept,
        ),
        keeps_state=keeps_of(model.diffusion_model, shared_by) is not None,
        sizes=_sizes(recognised.weights, model.diffusion_model, held),
        num_heads=next((unet_config[key] for key in ("num_heads", "num_attention_heads") if key in unet_config), 1),
        rounding_attention=rounding_attention(recognised.weights),
        widened_formats=() if on_cpu else widened_formats(recognised.config, recognised.weights),
    )


def _dtypes(recognised: Recognised, dtype: torch.dtype, kept: str) -> dict[str, torch.dtype]:
    """The dtype of each weight by name, as ComfyUI's class makes them where they are to be kept in fp8."""
    recognised.declare(dtype, kept)
    recognised.config.custom_operations = MetaOperations
    return {name: weight.dtype for name, weight in recognised.model(META).diffusion_model.named_parameters()}


def refuse_unplanned(
    transformer: torch.nn.Module, plan: ParallelPlan, specs: Mapping[str, ShardingSpec] = SPECS
) -> None:
    """Raise `ValueError` when ranks are to share tokens of a class that has no plan, or one for another ComfyUI.

    Raises it too for a class that no sampler calls, under any plan. Known here, before a worker is asked: what a worker
    refuses ends all of them.
    """
    if unusable := not_sampled(type(transformer)):
        raise ValueError(unusable)
    if plan.pipefusion > 1:
        _refuse_stages(transformer, plan, specs)
    if plan.parts * plan.pipefusion == 1:
        return
    if find_whole(type(transformer)) is not None:
        raise ValueError(
            f"{plan.describe()}: {why_unshared(transformer)}; in SP Config, mode manual with ulysses=1 and "
            f"ring=1, and cfg=2 (prompt and negative at once) or data={plan.parts} (images of a batch at once)"
        )
    try:
        find_hook_points(transformer, spec_of(transformer, specs))
    except ValueError as error:
        raise ValueError(f"{plan.describe()}: {error}; in SP Config, mode manual with ulysses=1 and ring=1") from error


def _refuse_stages(transformer: torch.nn.Module, plan: ParallelPlan, specs: Mapping[str, ShardingSpec]) -> None:
    """Raise `ValueError` when blocks of a class cannot be in the stages of a plan."""
    instead = "in SP Config, use pipefusion=1 with ulysses, ring, cfg or data"
    if specs is not SPECS:
        raise ValueError(
            f"pipefusion={plan.pipefusion}: patches between the blocks of {type(transformer).__name__} need all "
            f"tokens, and a stage has those of a part of the image; {instead}"
        )
    try:
        refuse_stages(transformer, plan.pipefusion)
    except ValueError as error:
        raise ValueError(f"{error}; {instead}") from error


def why_unshared(transformer: torch.nn.Module) -> str:
    """Why no ranks can share the tokens of one of ComfyUI's transformers; "" where there is a plan for its class that
    fits it, as this ComfyUI or the file has it."""
    if find_spec(transformer) is None:
        return f"ranks cannot share an image of {type(transformer).__name__}: {why_without(transformer)}"
    try:
        find_hook_points(transformer, spec_of(transformer))
    except ValueError as error:
        return f"ranks cannot share an image of {type(transformer).__name__}: {error}"
    return ""


def rounding_attention(weights: Mapping[str, torch.Tensor]) -> str:
    """The attention kernel that rounds more than exact ones and by which ComfyUI computes a file here; "" for none.

    A file may ask for one itself, for each attention: the configs of `ComfyAttention`s among its tensors, each of which
    has a function where this machine has the kernel.
    """
    functions = [comfy.ldm.modules.attention.optimized_attention]
    configs = [tensor for name, tensor in weights.items() if name.endswith("comfy_attention.config")]
    if configs and not is_absent(kind := comfy.ldm.modules.attention.ComfyAttention):
        asked = [kind() for _ in configs]
        for each, config in zip(asked, configs, strict=True):
            each.load_state_dict({"config": config})
        functions = list(dict.fromkeys(each.function or functions[0] for each in asked))
    names = sorted(map(title_of, functions), key=lambda name: SPARSE not in name)
    return next((name for name in names if any(word in name for word in ROUNDING)), "")


def this_comfyui() -> ComfyUI:
    """The ComfyUI that this process runs, and the options that its ranks get, as they are now."""
    return ComfyUI(os.path.dirname(os.path.dirname(os.path.abspath(comfy.model_base.__file__))), options_for_ranks())


def _sizes(
    weights: Mapping[str, torch.Tensor], transformer: torch.nn.Module, dtypes: Mapping[str, torch.dtype]
) -> WeightSizes:
    """Bytes of weights as ranks keep them: in `dtypes` by name, else as they are."""
    blocks: Counter[str] = Counter()
    known = find_whole(type(transformer))
    units = () if known is None else blocks_of(transformer, known.blocks, inner=known.inner)
    for name, weight in weights.items():
        parts = name.split(".")
        above = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
        unit = ".".join(parts[:2]) if known is None else next((each for each in above if each in units), "")
        blocks[unit] += weight.numel() * dtypes.get(name, weight.dtype).itemsize
    whole_everywhere = blocks.pop("", 0)
    return WeightSizes(total=blocks.total() + whole_everywhere, biggest_block=max(blocks.values()))
