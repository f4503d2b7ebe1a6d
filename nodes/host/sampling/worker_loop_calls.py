"""The conditionings of a sampling run in the workers, as calls of the model.

A rank has an image's latent as one row of numbers, (B, 1, numbers), whatever its dims. A call is one of `apply_model`,
which the rank runs too: it makes what depends on sigma besides the timestep (a timestep a token, added channels).

Owns the calls and which runs cannot have them. Does not own what else of a run may live in the workers
(worker_loop.py).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ....parallel_runtime.model_call import ModelCall
from ....parallel_runtime.models.hosted.calls import (
    read_of_other_rows,
    rows_that_belong_together,
    takes_whole_batches,
)
from ....parallel_runtime.models.hosted.formats import coarse_inputs
from ....parallel_runtime.models.hosted.other_calls import apply_call
from ....parallel_runtime.models.specs import find_spec
from ....parallel_runtime.models.specs.whole import find_whole
from ....parallel_runtime.pool.calls import shape_of, work_of_groups
from ..contract.comfyui import WrappersMP, comfy
from ..contract.order import of_step_cache
from ..contract.refusals import INSIDE_BLOCKS
from .model_sampling import HostLoopError
from .run_context import options_of_run, run_of
from .workload_from_guider import asks_negative

CAPTURE_KEY = "parallel_dit_capture"
SIDES = ("positive", "negative")


@dataclass(frozen=True)
class Cond:
    """A conditioning as the ranks' call of the model, and as the call by which plans are proven."""

    call: ModelCall
    module_call: ModelCall


def refuse_calls(guider: comfy.samplers.CFGGuider, model_options: dict) -> None:
    """Raise `HostLoopError` for calls that change from step to step or are shared out otherwise than step by step."""
    model = guider.inner_model.diffusion_model
    plan, kind = run_of(model_options).plan, type(model)
    options = model_options.get("transformer_options", {})
    if any(options.get(name) for name in INSIDE_BLOCKS):
        raise HostLoopError("a node patches the model's blocks")
    if takes_whole_batches(kind):
        raise HostLoopError(f"{kind.__name__} mixes the rows of a batch")
    spread = plan.layout.shards > plan.parts
    if spread and find_spec(model) is None and find_whole(kind) is None:
        raise HostLoopError(f"the order of {kind.__name__}'s blocks is not known, by which ranks share them")


def conds_of_run(
    guider: comfy.samplers.CFGGuider, model_options: dict, x: torch.Tensor, sigma: torch.Tensor
) -> list[Cond]:
    """What ComfyUI would call `apply_model` with in the first step, at `sigma` (1,).

    Both conditionings are in one call, where ComfyUI would have them so and one batch group asks for both.

    Raises `HostLoopError` for a video whose frames the plan would part, for rows that it would part where the class
    reads of each what another has, and for layers that round all rows of a step together where not all are in one call.
    """
    run, names = run_of(model_options), cond_names(guider, model_options)
    sigma, seen = sigma.expand(x.shape[0]), list[dict[str, Any]]()

    def apply_model(
        executor: Callable[..., torch.Tensor],
        latent: torch.Tensor,
        sigmas: torch.Tensor,
        c_concat: torch.Tensor | None = None,
        c_crossattn: torch.Tensor | None = None,
        control: object = None,
        transformer_options: Mapping[str, object] | None = None,
        **conds: object,
    ) -> torch.Tensor:
        pairs = zip(latent.split(len(x)), sigmas.split(len(x)), strict=True)
        if any(not torch.equal(each, x) or not torch.equal(at, sigma) for each, at in pairs):
            raise HostLoopError("the latent reaches the model changed")
        named = {"c_concat": c_concat, "c_crossattn": c_crossattn, "control": control}
        seen.append({**named, "transformer_options": transformer_options or {}, **conds})
        return executor(latent, sigmas, c_concat, c_crossattn, control, transformer_options, **conds)

    asked = [[name] for name in names] if run.plan.cfg > 1 else [list(names)]
    around = {WrappersMP.APPLY_MODEL: apply_model}
    inner = [call for each in asked for call in captured(guider, each, model_options, x, sigma, around)]
    groups = work_of_groups(run.plan, images=len(x), num_conds=len(names))
    images = [share.stop - share.start for share in groups if share.conds]
    _refuse_parted(guider, rows=len(x) * len(names), whole=len(seen) == 1 and len(images) == 1)
    found = [
        (_applied(guider, each, x, images, run.engine_options()), call) for each, call in zip(seen, inner, strict=True)
    ]
    if len(found) > 1 and len({shape_of([call]) for call, _ in found}) == 1:  # ComfyUI would have made one call of it
        _refuse_differing(type(guider.inner_model.diffusion_model), seen)
        found = [(replace(call, options={**call.options, "one_call": True}), inside) for call, inside in found]
    return [Cond(*each) for each in sorted(found, key=lambda each: each[0].options["sides"])]


def _refuse_parted(guider: comfy.samplers.CFGGuider, *, rows: int, whole: bool) -> None:
    """`rows` of a step, and whether they are one call."""
    recognised = guider.inner_model.prover.recognised
    if rows > 1 and not whole and coarse_inputs(recognised.config, recognised.weights):
        raise HostLoopError("layers of the file's format round all rows of a step by one scale")


def _refuse_differing(kind: type, calls: Sequence[Mapping[str, Any]]) -> None:
    """`calls`, as ranks apart would make them, of what ComfyUI has in one call."""
    first, *others = (read_of_other_rows(kind, kwargs) for kwargs in calls)
    if any(not torch.equal(*pair) for each in others for pair in zip(first, each, strict=False)):
        raise HostLoopError(f"{kind.__name__} mixes the rows of a batch")


def _applied(
    guider: comfy.samplers.CFGGuider,
    kwargs: dict[str, Any],
    x: torch.Tensor,
    images: Sequence[int],
    engine_options: Mapping[str, object],
) -> ModelCall:
    transformer = guider.inner_model.diffusion_model
    sides = kwargs["transformer_options"]["cond_or_uncond"]
    together = rows_that_belong_together(transformer, kwargs, len(x), sides=len(sides))
    if any(part % together for part in images):
        if kwargs.get("num_video_frames"):
            raise HostLoopError(f"the plan would part the {together} frames of a video")
        raise HostLoopError(f"{type(transformer).__name__} mixes the rows of a batch")
    call = apply_call(type(transformer).__name__, x.shape, sides, kwargs)
    return replace(call, options={**call.options, **engine_options})


def captured(
    guider: comfy.samplers.CFGGuider,
    names: Sequence[str],
    model_options: dict,
    x: torch.Tensor,
    sigma: torch.Tensor,
    around: Mapping[str, Callable[..., Any]] | None = None,
) -> list[ModelCall]:
    """The transformer's calls for some conditionings of a run, in a stock step that is answered with zeros.

    `around` are wrappers by their kind; those of step caches are left out, since they would take the zeros for outputs.
    Raises `HostLoopError` for more than one call of each.
    """
    calls: list[ModelCall] = []
    looking = replace(run_of(model_options), captured=calls)
    options = options_of_run(model_options, looking)
    inside = options["transformer_options"]
    wrappers = {kind: _without_caches(by_key) for kind, by_key in inside.get("wrappers", {}).items()}
    for kind, wrapper in (around or {}).items():
        wrappers[kind] = {**wrappers.get(kind, {}), CAPTURE_KEY: [wrapper]}
    inside["wrappers"] = wrappers
    conds = [guider.conds[each] if each in names else None for each in SIDES]  # the place says which side it is
    comfy.samplers.calc_cond_batch(guider.inner_model, conds, x, sigma, options)
    if not 1 <= len(calls) <= len(names):
        raise HostLoopError(f"the {' and '.join(names)} conditioning makes {len(calls)} calls of the model")
    return calls


def _without_caches(by_key: Mapping[str, list[Callable]]) -> dict[str, list[Callable]]:
    return {key: [each for each in found if not of_step_cache(each)] for key, found in by_key.items()}


def cond_names(guider: comfy.samplers.CFGGuider, model_options: dict) -> tuple[str, ...]:
    """The conditionings that each step asks for; ComfyUI needs no negative one that counts for nothing."""
    needless = guider.cfg == 1.0 and not guider.conds.get(SIDES[1])
    return SIDES if asks_negative(guider.cfg, model_options) and not needless else SIDES[:1]
