"""A ComfyUI MODEL whose transformer is elsewhere: ComfyUI's Flux without weights, its body replaced by a pool's step.

Patchify, padding, reference ids, prediction type and all wrappers stay ComfyUI's. Owns the names of a step's tensors,
made of the arguments of the body; what is refused about their values is models/flux/inputs.py's. Rounds nothing:
ComfyUI has rounded these arguments to the compute dtype as it does for its own model, and each keeps the dtype that it
came in. Does not own how a file is recognised (flux_source.py). Letters: `B` batch, `S_img` and `S_txt` image and text
tokens, `C` channels.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import comfy.ldm.flux.model
import comfy.model_base
import comfy.model_management
import torch

from ...parallel_runtime.models.flux.config import FluxConfig
from ...parallel_runtime.models.flux.inputs import check_step
from ...parallel_runtime.planner.automatic import Decision
from ...parallel_runtime.weight_patch import WeightPatchSet
from .flux_source import Source
from .meta import META
from .pooled_model import PooledModel
from .refusals import INSIDE_BLOCKS, check_transformer_options, refuse_in
from .run_context import RUN_KEY, RunContext, run_inside

# What ComfyUI's own Flux reads inside its blocks; every other patch name has no effect on it, there as here.
FLUX_PATCHES = ("post_input", "double_block", "single_block", "attn1_patch", "attn1_output_patch")
BODY = inspect.signature(comfy.ldm.flux.model.Flux.forward_orig)
# ComfyUI's names of what its body takes, and ours.
BODY_INPUTS = {name: name for name in ("img", "img_ids", "txt", "txt_ids", "timesteps", "y", "guidance", "control")}
BODY_INPUTS |= {"attn_mask": "mask", "timestep_zero_index": "zero_timestep"}
RESIDUAL_SIDES = {"input": "control_in", "output": "control_out"}


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
class ForwardArguments:
    """What ComfyUI's Flux hands to the body of its forward. Shapes as in `step_tensors`, ids with a batch dimension."""

    img: torch.Tensor
    img_ids: torch.Tensor
    txt: torch.Tensor
    txt_ids: torch.Tensor
    timesteps: torch.Tensor
    y: torch.Tensor | None
    guidance: torch.Tensor | None
    control: Mapping[str, Sequence[torch.Tensor | None]] | None
    mask: torch.Tensor | None = None
    zero_timestep: Sequence[
        tuple[int, int]
    ] = ()  # runs of image rows at timestep zero, whose timesteps follow the batch's


def step_tensors(
    given: ForwardArguments, config: FluxConfig
) -> tuple[dict[str, torch.Tensor], dict[str, list[int | None]]]:
    """The tensors and options of one call (`RunContext.step`).

    img (B, S_img, C), txt (B, S_txt, context), y (B, vec), guidance (B,), timesteps (B,) fp32, img_ids (S_img, 3) and
    txt_ids (S_txt, 3) fp32, where there are any a mask (B or 1, S_txt + S_img, the same) and zero_timestep_rows
    (S_img,), and each distinct ControlNet residual once, as control_in.K / control_out.K (B, up to S_img, hidden); the
    options give for each block the K of its residual, or None.
    Raises `ValueError` for shapes and values the model cannot take.
    """
    batch = given.img.shape[0]
    y = given.y
    if y is None:
        y = torch.zeros((batch, config.vec_dim), device=given.img.device, dtype=given.img.dtype)
    tensors = {
        "img": given.img,
        "txt": given.txt,
        "y": y[:, : config.vec_dim],
        "timesteps": given.timesteps[:batch].float(),  # never less: rounded to bf16 a call is 0.9 to 6 % off
        "img_ids": given.img_ids[0].float(),  # ComfyUI repeats one image's ids over the batch
        "txt_ids": given.txt_ids[0].float(),
    }
    if config.guidance and given.guidance is not None:
        tensors["guidance"] = given.guidance.expand(batch)
    if given.mask is not None:
        tensors["mask"] = _square(given.mask)
    if given.zero_timestep:
        tensors["zero_timestep_rows"] = torch.zeros(given.img.shape[1], dtype=torch.uint8)
        for start, stop in given.zero_timestep:
            tensors["zero_timestep_rows"][start:stop] = 1
    options = {}
    depths = {"input": config.depth, "output": config.depth_single}
    for side, name in RESIDUAL_SIDES.items():
        residuals = (given.control or {}).get(side) or []
        distinct, uses = _distinct(residuals[: depths[side]])
        for number, residual in enumerate(distinct):
            tensors[f"{name}.{number}"] = residual.expand(batch, -1, -1)
        if distinct:
            options[name] = uses + [None] * (depths[side] - len(uses))
    check_step(config, tensors)
    return tensors, options


def _square(mask: torch.Tensor) -> torch.Tensor:
    """A mask as torch's attention takes it, (S, S), (B, S, S) or (B, 1, S, S), to (B or 1, S, S)."""
    if mask.ndim == 4 and mask.shape[1] == 1:
        return mask[:, 0]
    return mask[None] if mask.ndim == 2 else mask


def _distinct(residuals: Sequence[torch.Tensor | None]) -> tuple[list[torch.Tensor], list[int | None]]:
    """Each residual once, and for each block which. ControlNets repeat one tensor over several blocks.

    Identity is enough, and safe: all of them are alive in this list, so no address can have been used twice.
    """
    numbers: dict[int, int] = {}
    distinct: list[torch.Tensor] = []
    uses: list[int | None] = []
    for residual in residuals:
        if residual is None:
            uses.append(None)
            continue
        if id(residual) not in numbers:
            numbers[id(residual)] = len(distinct)
            distinct.append(residual)
        uses.append(numbers[id(residual)])
    return distinct, uses
