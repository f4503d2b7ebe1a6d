"""A ComfyUI MODEL of any family whose transformer computes elsewhere: ComfyUI's own classes without weights.

The stock class stays, on the meta device, with its attributes and the names of its weights; what is replaced on the
instance is `forward`, and those methods that ComfyUI calls and that need weights (forward.py). Does not own how a
file is recognised (source.py).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import NoReturn, Protocol
from weakref import WeakMethod, ref

import torch

from ....parallel_runtime.models.hosted.other_calls import METHODS
from ....parallel_runtime.plan import ParallelPlan
from ....parallel_runtime.planner.automatic import Decision
from ....parallel_runtime.planner.counted import CountedModel, kept_by_step_cache
from ....parallel_runtime.stock_caches import cached_rows_bytes
from ....parallel_runtime.weight_delta import HOOK_WEIGHT, WeightDeltas
from ..contract.comfyui import comfy
from ..contract.refusals import refuse_by, refused_here
from ..contract.writers import executing_node, packs_with_models
from ..proof.proving import Prover
from ..sampling.corrected_shares import CorrectedShares
from ..sampling.run_context import RunContext, run_inside
from .changed_modules import note_as_made
from .forward import RemoteForward, RemoteMethod
from .pooled_model import PooledModel
from .source import HostedSource
from .weight_deltas import PREFIX


class RemoteModel(Protocol):
    """One of ComfyUI's `BaseModel`s with every weight on the meta device.

    A protocol, as it is an object of whichever class ComfyUI has for the file; `remote_hosted` adds these attributes.
    `diffusion_model.outside_runs` is the context of calls that come without a run. `prover` says whether plans compute
    what one device does. `last_run` is what is known of the last sampling run that began, a `LastRun`; None before one.
    `corrected`: the shares of its devices as runs corrected them.
    """

    pooled: PooledModel
    prover: Prover
    last_run: object
    corrected: CorrectedShares
    device: torch.device | None
    diffusion_model: torch.nn.Module
    made_with: Callable[[], torch.nn.Module]  # the transformer, whatever a node has put in its place
    model_loaded_weight_memory: int
    current_weight_patches_uuid: object

    def take_shapes(self, deltas: WeightDeltas) -> None:
        """Give the weights here the shapes that those in the workers have with these deltas: ComfyUI reads shapes."""

    def shape_of(self, key: str) -> torch.Size | None:
        """That of a weight without any delta, by ComfyUI's key; None for none of the transformer's."""


def kept_by_caches(run: RunContext, shape: Sequence[int]) -> float:
    """Bytes on one rank for a batch group's latents of `shape` (B, C, ..). Of a first-block cache, where the model was
    counted."""
    numbers, model, work = math.prod(shape[1:]), run.decision.model, run.decision.work
    found = float(cached_rows_bytes(shape[0] * numbers)) if run.stock_cache else 0.0
    if run.step_cache and isinstance(model, CountedModel) and work is not None:
        asked = replace(work, image_tokens=model.image_tokens(numbers), step_cache=True)
        plan = ParallelPlan() if run.whole else run.plan
        found += shape[0] * kept_by_step_cache(model, asked, plan)
    return found


# Buffers that a node reads from the model: SeedVR2's prompts.
READ_BY_NODES = ("positive_conditioning", "negative_conditioning")


def remote_hosted(source: HostedSource, pooled: PooledModel) -> comfy.model_base.BaseModel:
    """ComfyUI's model of this file on the meta device, whose transformer is called in the workers of `pooled`."""
    recognised, model = source.recognised, source.model
    model.device = None  # set by the patcher to where ComfyUI thinks the weights are
    model.pooled = pooled
    model.last_run, model.corrected = None, CorrectedShares()
    # Not held: a model that refers to itself outlives its patcher, and ComfyUI's manager keeps an entry without one.
    transformer, held_memory = model.diffusion_model, WeakMethod(model.memory_required)
    held_model = ref(model)

    def stock_memory(
        input_shape: Sequence[int], cond_shapes: Mapping | None = None, *more: object, **named: object
    ) -> float:
        """Bytes of activations of a whole call, as ComfyUI's class says; infinite once the model is gone."""
        stock = held_memory()
        return inf if stock is None else stock(input_shape, cond_shapes or {}, *more, **named)

    for name, buffer in list(transformer.named_buffers(recurse=False)):
        if name in READ_BY_NODES:
            setattr(transformer, name, recognised.weights[name].to(buffer.dtype))
    model.prover = Prover(transformer, recognised, pooled, stock_memory)
    transformer.outside_runs = RunContext(model=pooled, decision=Decision(plan=pooled.plan), prover=model.prover)

    # the frames of a video, or all rows, go to one batch group
    together = source.whole_batches or bool(recognised.config.unet_config.get("use_temporal_attention"))

    def memory_required(
        input_shape: Sequence[int], cond_shapes: Mapping | None = None, *more: object, **named: object
    ) -> float:
        """Bytes of activations on the device shared with ComfyUI: the rows of one batch group, the tokens of one
        rank. Where no rank computes there: those of a ControlNet, which does; without one 0 before a run, as no room is
        to be made; in a run those of a rank, as ComfyUI asks how many conditionings fit at once."""
        run, its = run_inside(pooled) or transformer.outside_runs, held_model()
        plan = run.plan
        ranks = pooled.ranks_on(comfy.model_management.get_torch_device(), plan)
        if not ranks and run.controlled:
            return stock_memory(input_shape, cond_shapes, *more, **named)
        if not ranks and (its is None or its.current_patcher is None):  # before a run
            return 0.0
        rows = -(-input_shape[0] // (1 if together else plan.batch_groups))
        # functions between blocks meet whole tokens on every rank
        everywhere = run.whole or any(delta.kind == HOOK_WEIGHT for delta in run.deltas.deltas)
        parts = 1 if everywhere else plan.parts
        whole = stock_memory([rows, *input_shape[1:]], cond_shapes, *more, **named)
        kept = kept_by_caches(run, [rows, *input_shape[1:]])
        return max(1, ranks) * (whole / parts + pooled.visiting_bytes(plan) + kept)

    model.memory_required = memory_required
    model.take_shapes = shapes = MetaShapes(transformer)
    model.shape_of = shapes.shape_of
    transformer.forward = RemoteForward(transformer, pooled, model.latent_format.latent_channels)
    for name in METHODS:
        if hasattr(type(transformer), name):
            setattr(transformer, name, RemoteMethod(transformer, pooled, name))
    for module in transformer.modules():
        vars(module)["_apply"] = _refuse_values
    note_as_made(transformer)
    model.made_with = lambda: transformer
    return model


def _refuse_values(*_: object, **__: object) -> NoReturn:
    """In the place of what `to`, `cuda` and `float` of a torch module call for its weights, which have no values here.

    Refused; torch's own error names neither the node nor what to do. Stock samplers move no MODEL of ours, but another
    one that a pack made around the same weights.
    """
    now = executing_node()
    if now is not None and now.stock and (packs := packs_with_models()):
        raise refuse_by(packs, "it moves the model's weights, or hands on another MODEL around them")
    raise ValueError(str(refused_here("it reads the model's weights")))


class MetaShapes:
    """Keeps the shapes of the weights on the meta device those of the patched weights in the workers.

    Where a LoRA makes the first layer wider, ComfyUI reads from it how many channels are added to the latent's.
    """

    def __init__(self, transformer: torch.nn.Module) -> None:
        self._transformer = transformer
        self._stock: dict[str, torch.nn.Parameter] = {}

    def __call__(self, deltas: WeightDeltas) -> None:
        """Take the shapes of these deltas, and back those of all others."""
        for name in list(self._stock):
            self._put(name, self._stock.pop(name))
        for delta in deltas.deltas:
            if delta.new_shape is not None:
                self._stock.setdefault(delta.key, self._transformer.get_parameter(delta.key))
                wider = torch.empty(delta.new_shape, dtype=self._stock[delta.key].dtype, device="meta")
                self._put(delta.key, torch.nn.Parameter(wider, requires_grad=False))

    def shape_of(self, key: str) -> torch.Size | None:
        """Of a weight without deltas, by ComfyUI's key."""
        name = key.removeprefix(PREFIX)
        try:
            return (self._stock[name] if name in self._stock else self._transformer.get_parameter(name)).shape
        except AttributeError:
            return None

    def _put(self, name: str, weight: torch.nn.Parameter) -> None:
        path, _, last = name.rpartition(".")
        setattr(self._transformer.get_submodule(path), last, weight)
