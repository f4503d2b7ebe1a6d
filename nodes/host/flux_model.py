"""A ComfyUI MODEL whose transformer is elsewhere: ComfyUI's Flux without weights, its body replaced by a pool's step.

Patchify, padding, reference ids, prediction type and all wrappers stay ComfyUI's. Does not own how a file is recognised
(flux_source.py), nor the tensors of a step (parallel_runtime/models/flux/inputs.py).
"""

import inspect

import torch

from ...parallel_runtime.models.flux.config import FluxConfig
from ...parallel_runtime.models.flux.inputs import ForwardArguments, step_tensors
from ...parallel_runtime.planner.automatic import Decision
from ...parallel_runtime.weight_patch import WeightPatchSet
from .comfyui import Part, check_cancelled, comfy
from .flux_source import Source
from .kept_memory import kept_by_caches
from .meta import META
from .pooled_model import PooledModel
from .refusals import INSIDE_BLOCKS, check_transformer_options
from .run_context import RUN_KEY, RunContext, place_of, run_inside

# What ComfyUI's own Flux reads inside its blocks; every other patch name has no effect on it, there as here.
FLUX_PATCHES = ("post_input", "double_block", "single_block", "attn1_patch", "attn1_output_patch")
STOCK_FLUX = Part("comfy.ldm.flux.model.Flux")
BODY = inspect.signature(STOCK_FLUX.forward_orig)
# ComfyUI's names of what its body takes, and ours. With one that takes more, the contract turns this off.
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
        if not INSIDE_BLOCKS.isdisjoint(transformer_options):
            check_transformer_options(transformer_options, FLUX_PATCHES, written=run.written)
        known = {ours: inputs.get(theirs) for theirs, ours in BODY_INPUTS.items()}
        given = ForwardArguments(**known | {"zero_timestep": known["zero_timestep"] or ()})
        tensors, options = step_tensors(given, self.config)
        out = run.call(
            tensors,
            out_shape=(*tensors["img"].shape[:2], self.out_channels),
            out_dtype=tensors["img"].dtype,
            options=options,
            place=place_of(transformer_options),
            check_cancelled=check_cancelled,
        )
        return out.to(given.img.device, non_blocking=True)


class RemoteFlux(comfy.model_base.Flux):
    """ComfyUI's Flux.1 model around a `RemoteTransformer`."""

    patch_kinds, prover = FLUX_PATCHES, None

    def __init__(self, source: Source, pooled: PooledModel) -> None:
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

    def memory_required(
        self, input_shape: list[int], cond_shapes: dict | None = None, *more: object, **named: object
    ) -> float:
        """Bytes of activations on the device shared with ComfyUI: the rows of one batch group, the tokens of one rank.

        Counted for one rank even where none shares it. Of sharded weights, the blocks that become whole count too.
        """
        run = run_inside(self.pooled) or self.diffusion_model.outside_runs
        rows = -(-input_shape[0] // run.plan.batch_groups)
        whole = super().memory_required([rows, *input_shape[1:]], cond_shapes or {}, *more, **named)
        ranks = max(1, self.pooled.ranks_on(comfy.model_management.get_torch_device(), run.plan))
        kept = self.pooled.visiting_bytes(run.plan) + kept_by_caches(run, [rows, *input_shape[1:]])
        return ranks * (whole / run.plan.parts + kept)
