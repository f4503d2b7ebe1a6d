"""What a sampling run is asked for, as the planner takes it: tokens, images, conditionings, steps.

Owns reading that off a guider when its run begins, and off a sampler node's inputs before. Chooses and runs nothing.
"""

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any

import torch

from ....parallel_runtime.models.specs import find_spec
from ....parallel_runtime.planner.automatic import Decision
from ....parallel_runtime.planner.counted import CountedModel
from ....parallel_runtime.planner.work import KEPT_ON, STORED_AS, Work
from ..contract.comfyui import CFGGuider, ModelPatcher, comfy
from ..contract.order import why_calls_keep_order, why_runs_keep_order
from ..contract.version import off

Sides = Mapping[str, Sequence[dict] | None]


def asks_negative(cfg: object, model_options: Mapping[str, object]) -> bool:
    """Whether the negative side is asked each step. As ComfyUI: not with cfg 1. A pack's guider may have a list, a
    scale for each step."""
    alone = isinstance(cfg, Real) and math.isclose(cfg, 1.0)
    return not alone or bool(model_options.get("disable_cfg1_optimization", False))


def asks_both(guider: CFGGuider) -> bool:
    """Whether both prompt and negative are asked each step, and at once: Dual Model CFG Guider, which has a MODEL for
    each, asks one after the other."""
    if sum(isinstance(each, ModelPatcher) for each in vars(guider).values()) > 1:
        return False
    return len(_asked(guider.conds, guider.cfg, guider.model_options)) > 1


def work_of_run(guider: CFGGuider, noise: torch.Tensor, sigmas: torch.Tensor, decision: Decision) -> Work | None:
    """The work of a run that begins: `noise` (B, C, H, W) or as the model has it, `sigmas` (steps + 1,).

    None where nothing was weighed, and for a latent without images. Of the work that `decision` was
    for only the bytes of elements and weights stay. It counts as guided where prompt and negative can be asked at once
    in every step.
    """
    if decision.work is None or off("choice"):
        return None
    sides = _asked(guider.conds, guider.cfg, guider.model_options)
    keep_order = why_calls_keep_order(guider.model_patcher.callbacks, _entries(sides), guider.model_options)
    at_once = keep_order is None and asks_both(guider)
    work = _work(decision, noise.shape, sides, steps=len(sigmas) - 1, at_once=at_once)
    return _of_model(work, guider.model_patcher, guider.model_options)


def as_sampled(model: ModelPatcher, latent: Mapping[str, Any]) -> dict[str, Any]:
    """The latent as ComfyUI samples it: one that is empty gets the channels, the size and the dims of the model's."""
    fixed = comfy.sample.fix_empty_latent_channels
    made_for = {name: latent[name] for name in inspect.signature(fixed).parameters if name in latent}
    rest = {name: value for name, value in latent.items() if name not in made_for}
    return rest | {"samples": fixed(model, latent["samples"], **made_for)}


def work_of_settings(model: ModelPatcher, settings: Mapping[str, Any], decision: Decision) -> Work | None:
    """The same of a sampling run with KSampler's inputs, before it begins."""
    if decision.work is None or off("choice"):
        return None
    conds = {name: settings[name] for name in ("positive", "negative")}
    converted = {name: comfy.sampler_helpers.convert_cond(each) for name, each in conds.items()}
    sides = _asked(converted, settings["cfg"], model.model_options)
    keep_order = why_runs_keep_order(model, conds.values()) or why_calls_keep_order({}, _entries(sides), {})
    latent, steps = as_sampled(model, settings["latent"])["samples"], settings["steps"]
    work = _work(decision, latent.shape, sides, steps=steps, at_once=keep_order is None)
    return _of_model(work, model, model.model_options)


def _asked(conds: Sides, cfg: object, model_options: Mapping[str, object]) -> list[Sequence[dict]]:
    """The sides that are asked and have something to say."""
    negative = asks_negative(cfg, model_options)
    return [side for name, side in conds.items() if side and (negative or name != "negative")]


def _entries(sides: Sequence[Sequence[dict]]) -> list[dict]:
    return [entry for side in sides for entry in side]


def _work(
    decision: Decision, shape: Sequence[int], sides: Sequence[Sequence[dict]], *, steps: int, at_once: bool
) -> Work | None:
    usual, model = decision.work, decision.model
    if usual is None or not isinstance(model, CountedModel) or math.prod(shape) == 0:
        return None

    def tokens(shape: Sequence[int]) -> int:
        return model.image_tokens(math.prod(shape[1:]))

    entries = _entries(sides)
    texts = [0 if entry.get("cross_attn") is None else entry["cross_attn"].shape[1] for entry in entries]
    references = [sum(tokens(each.shape) for each in entry.get("reference_latents") or ()) for entry in entries]
    image, kept = tokens(shape), 0
    if model.kept_bytes:  # of references as of the text
        texts, kept = [sum(each) for each in zip(texts, references, strict=True)], max(references, default=0)
    else:
        image += max(references, default=0)
    return replace(
        usual,
        image_tokens=image,
        text_tokens=max(texts, default=0),
        reference_tokens=kept,
        guided=at_once and len(sides) > 1 and not any(map(_is_for_some_steps, entries)),
        batch=shape[0],
        steps=max(1, steps),
    )


def _of_model(work: Work | None, model: ModelPatcher, model_options: Mapping[str, Any]) -> Work | None:
    """The work with what nodes did to the MODEL: with changed weights or patches of blocks there are no graphs; and
    where and how its class keeps something between steps, as a node may have said."""
    if work is None:
        return None
    options = model_options["transformer_options"]
    changed = bool(model.patches or options.get("patches") or options.get("patches_replace"))
    work, plan = replace(work, graphs=work.graphs and not changed), find_spec(model.model.diffusion_model)
    if plan is None or plan.keeps is None:
        return work
    said = options.get(plan.keeps.option, {})
    device = said.get("device")
    return replace(work, kept_on=device if device in KEPT_ON else KEPT_ON[0], kept_as=said.get("dtype", STORED_AS))


def _is_for_some_steps(entry: Mapping[str, object]) -> bool:
    return entry.get("start_percent", 0.0) > 0.0 or entry.get("end_percent", 1.0) < 1.0
