"""A ComfyUI MODEL whose transformer is elsewhere: ComfyUI's Flux without weights, its body replaced by a pool's step.

Patchify, padding, reference ids, prediction type and all wrappers stay ComfyUI's. Reads a file's header, no weights.
"""

import inspect
import os
from collections import Counter
from dataclasses import dataclass

import comfy.ldm.flux.model
import comfy.model_base
import comfy.model_detection
import comfy.model_management
import comfy.ops
import comfy.utils
import torch
from comfy.supported_models_base import BASE

from ...parallel_runtime.checkpoint import CheckpointHeader, ModelSpec, read_header
from ...parallel_runtime.devices import Device
from ...parallel_runtime.models.flux.config import FluxConfig, file_names
from ...parallel_runtime.models.flux.family import FluxModel
from ...parallel_runtime.models.hosted.dtypes import compute_dtype
from ...parallel_runtime.planner.automatic import Decision, usual_work
from ...parallel_runtime.planner.shapes import ModelShape, Work
from ...parallel_runtime.weight_patch import WeightPatchSet
from ...parallel_runtime.weights.model_file import weight_bytes
from .flux_conditioning import ForwardArguments, step_tensors
from .meta import META, MetaOperations
from .pooled_model import PooledModel, WeightSizes
from .refusals import check_transformer_options, refuse_in
from .run_context import RUN_KEY, RunContext, run_inside

# What ComfyUI's own Flux reads inside its blocks; every other patch name has no effect on it, there as here.
FLUX_PATCHES = ("post_input", "double_block", "single_block", "attn1_patch", "attn1_output_patch")
HEAD_DIM = 128  # the only one ComfyUI's Flux knows
BODY = inspect.signature(comfy.ldm.flux.model.Flux.forward_orig)
# ComfyUI's names of what its body takes, and ours.
BODY_INPUTS = {name: name for name in ("img", "img_ids", "txt", "txt_ids", "timesteps", "y", "guidance", "control")}
BODY_INPUTS |= {"attn_mask": "mask", "timestep_zero_index": "zero_timestep"}


class RemoteTransformer(comfy.ldm.flux.model.Flux):
    """ComfyUI's Flux with every weight on the meta device. `RemoteFlux` sets what belongs to it.

    `outside_runs` is how calls run that come without a run of this model: as the MODEL says that ComfyUI loaded last. A
    guider with two models makes them with the other's options, and so does a node that calls the model by itself.
    """

    pooled: PooledModel
    config: FluxConfig
    outside_runs: RunContext

    @torch.compiler.disable
    def forward_orig(self, *arguments: object, **named: object) -> torch.Tensor:
        """The body of ComfyUI's forward: (B, S_img, C) in, (B, S_img, out channels) out, run by the workers.

        What it takes, and in which order, is this ComfyUI's to say; its caller passes most of it by position.
        """
        inputs = dict(BODY.bind(self, *arguments, **named).arguments)
        inputs.pop("self")
        transformer_options = dict(inputs.pop("transformer_options", {}))
        run = transformer_options.pop(RUN_KEY, None)
        if run is None or run.model is not self.pooled:
            run = self.outside_runs
        check_transformer_options(transformer_options, FLUX_PATCHES)
        known = {ours: inputs.pop(theirs, None) for theirs, ours in BODY_INPUTS.items()}
        for what, value in inputs.items():
            if value is not None:
                raise refuse_in("the node that adds it", f"the conditioning asks for {what}")
        given = ForwardArguments(**known | {"zero_timestep": known["zero_timestep"] or ()})
        tensors, options = step_tensors(given, self.config)
        out = run.step(
            tensors,
            out_channels=self.out_channels,
            options=options,
            place=_place(transformer_options),
            check_cancelled=comfy.model_management.throw_exception_if_processing_interrupted,
        )
        return out.to(given.img.device)


class RemoteFlux(comfy.model_base.Flux):
    """ComfyUI's Flux.1 model around a `RemoteTransformer`."""

    patch_kinds, prover = FLUX_PATCHES, None

    def __init__(self, source: "Source", pooled: PooledModel) -> None:
        types = comfy.model_base.ModelType
        super().__init__(
            source.model_config,
            model_type=types.FLUX if source.config.guidance else types.FLOW,
            device=META,
            unet_model=RemoteTransformer,
        )
        self.device = None  # set by the patcher to where ComfyUI thinks the weights are
        self.pooled = pooled
        self.diffusion_model.pooled = pooled
        self.diffusion_model.config = source.config
        self.diffusion_model.outside_runs = RunContext(model=pooled, decision=Decision(plan=pooled.plan))

    def take_shapes(self, patches: WeightPatchSet) -> None:
        """Nothing to do: our own engine takes no patch that changes a shape."""

    def memory_required(self, input_shape: list[int], cond_shapes: dict | None = None) -> float:
        """Bytes of activations on the device shared with ComfyUI: the rows of one batch group, the tokens of one rank.

        Counted for one rank even where none shares it. Of sharded weights, the blocks that become whole count too.
        """
        plan = (run_inside(self.pooled) or self.diffusion_model.outside_runs).plan
        rows = -(-input_shape[0] // plan.batch_groups)
        whole = super().memory_required([rows, *input_shape[1:]], cond_shapes=cond_shapes or {})
        ranks = max(1, self.pooled.ranks_on(comfy.model_management.get_torch_device(), plan))
        return ranks * (whole / plan.parts + self.pooled.visiting_bytes(plan))


def _place(transformer_options: dict) -> str | None:
    """What tells a call from the others of its step: the conditionings in it, which have new names in every run."""
    names = transformer_options.get("uuids")
    return " ".join(map(str, names)) if names else None


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
    dtype = compute_dtype(weight_dtype, weights, model_config, device)
    model_config.set_inference_dtype(dtype, None)
    model_config.custom_operations = MetaOperations
    return Source(
        config=config,
        model_config=model_config,
        spec=ModelSpec.of(path, str(dtype).removeprefix("torch.")),
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
