"""A whole sampling run inside the pool: whether it can live there, what it is given, and what comes back each step.

ComfyUI prepares everything as it always does: conditionings, sigmas, noise, masks, guidance. One stock call of the
model, answered with nothing, shows what each conditioning becomes on its way to the model (worker_loop_calls.py); that
and the sampler's recurrence go to the workers, which then need the host no more. What this file cannot vouch for stays
in ComfyUI's own loop, and the reason is said.
"""

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from types import FunctionType, MethodType

import torch

from ....parallel_runtime.plan import ParallelPlan
from ....parallel_runtime.pool.calls import (
    Inpaint,
    WorkerLoopRun,
    refuse_long,
    refuse_unfit_loop,
    seen_shape,
    work_of_groups,
)
from ....parallel_runtime.redact_paths import redact_paths
from ....parallel_runtime.sampler_recurrence import SamplerRecurrence
from ..contract.comfyui import CFGGuider, WrappersMP, check_cancelled, comfy, is_absent
from ..contract.foreign_code import foreign, foreign_option
from ..contract.order import CALLBACKS_IN_A_STEP
from ..contract.version import off
from ..tasks.cond_tasks import TOGETHER_KEY, tell_idle
from .model_sampling import HostLoopError, with_predictions
from .run_context import RunContext, run_of
from .stock_caches import cache_keys, cache_of_run
from .trace_recurrence import SamplerRun, Traced, given_tensors, noise_bytes, random_state_kept, trace
from .worker_loop_calls import cond_names, conds_of_run, refuse_calls

log = logging.getLogger(__name__)

MOST_NOISE_BYTES = 1 << 30  # drawn ahead, in host memory, and as much again where ranks read it
# What makes a conditioning differ from step to step, from place to place, or need the host at each step.
BY_STEP = {
    "area": "a conditioning has an area",
    "mask": "a conditioning has a mask",
    "strength": "a conditioning has a strength",
    "control": "a ControlNet",
    "hooks": "a conditioning has hooks",
    "gligen": "GLIGEN",
    "default": "a default conditioning",
}
OPTIONS = {
    "model_function_wrapper": "a node wraps the model's call",
    "sampler_cfg_function": "a node replaces the cfg function",
    "sampler_pre_cfg_function": "a node changes what comes before cfg",
    "sampler_post_cfg_function": "a node changes what comes after cfg",
    "sampler_calc_cond_batch_function": "a node replaces the model's calls",
    "denoise_mask_function": "a node changes the noise mask by step",
    "context_handler": "context windows",
}
# What a sampler may raise that does not find the latent or the model it expects.
UNTRACEABLE = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
UNTRACEABLE += (MemoryError,)
# Parts of ComfyUI's model that are read before the first step alone, whatever replaced them.
READ_BEFORE = ("model_sampling", "latent_format", "concat_keys")
# Wrappers around the whole run do not see what happens inside it.
OUTSIDE = {WrappersMP.OUTER_SAMPLE, WrappersMP.PREPARE_SAMPLING, WrappersMP.SAMPLER_SAMPLE}


# Functions of ComfyUI that run in each step of its loop; a pack that replaces one would not be asked in the workers.
STEP_FUNCTIONS = ("sampling_function", "calc_cond_batch", "_calc_cond_batch_outer", "_calc_cond_batch", "cfg_function")
MODEL_METHODS = {"apply_model", "_apply_model", "process_timestep"}
SET_ON_A_MODEL = (FunctionType, MethodType, partial)
READ_OF_GUIDERS = ("cfg", "conds", "inner_model", "model_options", "model_patcher")  # set on each, by its own methods
SETTERS = ("__init__", "set_conds", "set_cfg")  # of guiders; run before a run begins


def to_workers(sampler: comfy.samplers.Sampler, run: RunContext) -> comfy.samplers.Sampler:
    """The same sampler with its loop in the workers where that can be; what was found is noted in the run."""
    if off("loop"):
        run.stays(str(off("loop")))
    elif type(sampler) is not comfy.samplers.KSAMPLER:
        run.stays(f"the sampler is a {type(sampler).__name__}")
    elif changed := vars(sampler).keys() - vars(comfy.samplers.KSAMPLER(None)).keys():
        run.stays(f"the sampler has its own {', '.join(sorted(changed))}")
    else:
        return WorkerLoopSampler(sampler, run)
    return sampler


class WorkerLoopSampler(comfy.samplers.KSAMPLER):
    """A stock sampler with its loop in the workers. What cannot live there it samples as the stock one does.

    Noise, masks and callbacks are prepared by the stock class; our sampler function takes the place of its own. To
    other code it has the stock one's function and options; what is put in their place is what samples.
    """

    def __init__(self, stock: comfy.samplers.KSAMPLER, run: RunContext) -> None:
        super().__init__(stock.sampler_function, stock.extra_options, stock.inpaint_options)
        self._of_run = run

    def sample(
        self,
        guider: comfy.samplers.CFGGuider,
        sigmas: torch.Tensor,
        extra_args: dict,
        callback: Callable | None,
        *arguments: object,
        **named: object,
    ) -> torch.Tensor:
        """As any sampler's. Raises `PoolError` when a worker fails, and ComfyUI's interrupt when the user cancels.

        That a run must stay in ComfyUI's loop is known before any rank is asked, and before torch's random state moves.
        """
        run, stays = run_of(extra_args["model_options"]) or self._of_run, ""
        try:
            _refuse(guider, extra_args["model_options"])
            _refuse_foreign(self, guider, callback)
            ours = comfy.samplers.KSAMPLER(self._run, self.extra_options, self.inpaint_options)
            samples = ours.sample(guider, sigmas, extra_args, callback, *arguments, **named)
        except HostLoopError as error:
            stays = redact_paths(str(error))  # the sampler's own words may be part of it
        if stays:  # after the error is gone, which holds the tensors of what raised it
            log.info("the loop stays in ComfyUI: %s", stays)
            run.stays(stays)
            return super().sample(guider, sigmas, extra_args, callback, *arguments, **named)
        run.loop = "resident"
        return samples

    def _run(
        self,
        model: comfy.samplers.KSamplerX0Inpaint,
        x: torch.Tensor,
        sigmas: torch.Tensor,
        *,
        extra_args: dict,
        callback: Callable[[dict], None] | None,
        disable: bool,
        **extra_options: object,
    ) -> torch.Tensor:
        """What stands where the stock class has its sampler function: (B, C, H, W) noise in, the sampled latent out."""
        guider, model_options = model.inner_model, extra_args["model_options"]
        context = run_of(model_options)
        run = SamplerRun(sampler=self, guider=guider, sigmas=sigmas, extra_args=extra_args)
        mask = extra_args["denoise_mask"]
        traced = _traced(run)
        recurrence, model_options = traced.recurrence, _as_calls_see(model_options, sigmas, traced.sigmas_in_calls)
        with _traceable(lambda error: f"what the model says of a step's latent cannot be written as numbers: {error}"):
            recurrence = with_predictions(recurrence, guider.inner_model, dims=x.ndim, masked=mask is not None)
        _ask(refuse_long, recurrence)
        _refuse_ranges(guider, model_options, recurrence)
        with _traceable(lambda error: f"how the model noises what a mask keeps cannot be written as numbers: {error}"):
            inpaint = _inpaint(model, mask, x, recurrence)
        names = cond_names(guider, model_options)
        before, conds = None, []
        while before != context.proven_for:  # a plan whose proof fails gives way to another, which calls otherwise
            before = plan, *_ = context.proven_for
            _refuse_idle(plan, x.shape[0], len(names))
            conds = conds_of_run(guider, model_options, x, sigmas[:1])
            for cond in conds:
                context.check(cond.module_call, check_cancelled)
            context.try_plans([cond.module_call for cond in conds], check_cancelled)
        if len({seen_shape(cond.call) for cond in conds}) > 1:
            raise HostLoopError("one conditioning has other reference images than the other")
        cached = cache_of_run(guider, model_options, x, sigmas[:1], recurrence)
        _ask(refuse_unfit_loop, plan, [cond.call for cond in conds], cached and cached.cache)
        tell_idle(context, len(names) * x.shape[0])
        given = _drawn(run, recurrence, x)

        def step_done(step: int, rows: torch.Tensor) -> None:
            denoised = rows.reshape(x.shape).to(x.device)
            if callback is not None:
                callback({"i": step, "denoised": denoised, "x": denoised})
            if bar is not None:
                bar.update()

        asked = WorkerLoopRun(
            recurrence=recurrence,
            conds=tuple(cond.call for cond in conds),
            cfg=float(guider.cfg),
            given={number: _as_rows(tensor).float() for number, tensor in given.items()},
            inpaint=inpaint and Inpaint(**{name: _as_rows(part).float() for name, part in inpaint.items()}),
            cache=cached and cached.cache,
            looked_at=cached and _as_rows(cached.looked_at).bool(),
        )
        draw = comfy.k_diffusion.sampling.tqdm  # as the samplers do in ComfyUI's log
        with nullcontext() if is_absent(draw) else draw(total=len(recurrence.step_ends), disable=disable) as bar:
            result = context.sample(asked, on_step=step_done, check_cancelled=check_cancelled)
        sigmas.copy_(traced.sigmas_left)
        if cached is not None:
            cached.holder.total_steps_skipped = result.skipped_calls
        return result.out.reshape(x.shape).to(device=x.device, dtype=x.dtype)


def _refuse(guider: comfy.samplers.CFGGuider, model_options: dict) -> None:
    """Raise `HostLoopError` for a MODEL, guider or conditionings that need the host.

    `model_options` are the sampler's: a wrapper around it may have changed those of the guider.
    """
    context = run_of(model_options)
    if context is None or vars(guider.inner_model).get("pooled") is not context.model:
        raise HostLoopError("the MODEL is a stock loader's")
    _refuse_guider(guider, model_options)
    _refuse_model(guider)
    _refuse_conds(guider, model_options)
    refuse_calls(guider, model_options)


def _as_rows(latent: torch.Tensor) -> torch.Tensor:
    """(B, ...) as (B, 1, numbers)."""
    return latent.reshape(latent.shape[0], 1, -1)


def _refuse_guider(guider: comfy.samplers.CFGGuider, model_options: dict) -> None:
    """Raise `HostLoopError` for what changes from step to step by other hands than the sampler's."""
    kind = type(guider)
    told = any(hasattr(kind, name) and not hasattr(CFGGuider, name) for name in READ_OF_GUIDERS)
    if told or any(getattr(kind, name) is not getattr(CFGGuider, name) or name in vars(guider) for name in _methods()):
        raise HostLoopError(f"the guider is a {kind.__name__}")
    for name, reason in OPTIONS.items():
        if model_options.get(name):
            raise HostLoopError(reason)
    wrappers = model_options.get("transformer_options", {}).get("wrappers", {})
    inside = {kind: by_key for kind, by_key in wrappers.items() if kind not in OUTSIDE}
    known = cache_keys(model_options, inside)
    wrapped = [(kind, key) for kind, by_key in inside.items() for key, found in by_key.items() if found]
    wrapped = [each for each in wrapped if each not in known and each[1] != TOGETHER_KEY]  # the latter is ours
    others = dict.fromkeys(key or _module_of(inside[kind][key]) for kind, key in wrapped)
    if others:
        raise HostLoopError(f"a node wraps the model's calls ({', '.join(map(str, others))})")


def _module_of(wrappers: Sequence[object]) -> str:
    """Where functions that a node put in without a name are defined."""
    return str(getattr(wrappers[0], "__module__", None) or type(wrappers[0]).__module__)


def _methods() -> list[str]:
    """What a guider does in a run, by name; what it is told before may be told in another way."""
    return [name for name, value in vars(CFGGuider).items() if isinstance(value, FunctionType) and name not in SETTERS]


def _refuse_foreign(sampler: WorkerLoopSampler, guider: comfy.samplers.CFGGuider, callback: Callable | None) -> None:
    """Raise `HostLoopError` where code of a pack looks at the steps: a step's callback, the sampler's own function or
    options, what is called as a step begins, and what stands in the place of functions of ComfyUI's."""
    if callback is not None and (pack := foreign(callback)):
        raise HostLoopError(f"a function of {pack} looks at each step")
    for value in (sampler.sampler_function, *sampler.extra_options.values()):
        if pack := foreign_option(value):
            raise HostLoopError(f"the sampler is one of {pack}")
    options = guider.model_options.get("transformer_options", {})
    for by_kind in (guider.model_patcher.callbacks, options.get("callbacks", {})):
        for kind in CALLBACKS_IN_A_STEP:
            if any(by_kind.get(kind, {}).values()):
                raise HostLoopError(f"a node looks at each step ({', '.join(map(str, by_kind[kind]))})")
    functions = {name: getattr(comfy.samplers, name) for name in STEP_FUNCTIONS}
    functions |= {name: getattr(CFGGuider, name) for name in _methods()}
    model = guider.inner_model
    bases = type(model).__mro__
    functions |= {
        f"{base.__name__}.{name}": vars(base)[name] for base in bases for name in MODEL_METHODS & vars(base).keys()
    }
    functions |= {name: value for name, value in vars(model).items() if isinstance(value, SET_ON_A_MODEL)}
    functions["KSamplerX0Inpaint"] = vars(comfy.samplers.KSamplerX0Inpaint)["__call__"]
    for name, function in functions.items():
        if not is_absent(function) and (pack := foreign(function)):
            raise HostLoopError(f"{pack} replaces {name} of ComfyUI")


def _refuse_model(guider: comfy.samplers.CFGGuider) -> None:
    """Raise `HostLoopError` for parts of the model that a node replaced and that each step reads."""
    for name in guider.model_patcher.object_patches:
        if not name.startswith(READ_BEFORE):
            raise HostLoopError(f"a node replaces the model's {name}")


def _refuse_conds(guider: comfy.samplers.CFGGuider, model_options: dict) -> None:
    """Raise `HostLoopError` for conditionings that are not one and the same at each step and place."""
    for name in cond_names(guider, model_options):
        entries = guider.conds.get(name) or []
        if len(entries) != 1:
            raise HostLoopError(f"the {name} conditioning has {len(entries)} parts")
        for key, reason in BY_STEP.items():
            if entries[0].get(key) is not None:
                raise HostLoopError(reason)


def _drawn(run: SamplerRun, recurrence: SamplerRecurrence, x: torch.Tensor) -> dict[int, torch.Tensor]:
    """The noise of all steps, which ComfyUI's loop draws one by one. Raises `HostLoopError`, with torch's random state
    as it was, where it takes much memory or more than there is, and what `check_cancelled` raises: a Brownian tree
    takes seconds a draw."""
    num_bytes = noise_bytes(recurrence, x)
    if num_bytes > MOST_NOISE_BYTES:
        raise HostLoopError(f"the noise of all steps takes {num_bytes >> 20} MiB, more than {MOST_NOISE_BYTES >> 20}")
    with (
        _traceable(lambda error: f"the noise of all steps cannot be drawn ahead: {error}"),
        random_state_kept(x.device),
    ):
        return given_tensors(run, recurrence, x, check_cancelled)


def _refuse_ranges(guider: comfy.samplers.CFGGuider, model_options: dict, recurrence: SamplerRecurrence) -> None:
    """Raise `HostLoopError` for a conditioning that some of the run's calls leave out, as ComfyUI does by sigma."""
    sigmas = [state.sigma for state in recurrence.states if state.sigma is not None]
    for name in cond_names(guider, model_options):
        (entry,) = guider.conds[name]
        first, last = entry.get("timestep_start"), entry.get("timestep_end")
        if (first is not None and max(sigmas) > first) or (last is not None and min(sigmas) < last):
            raise HostLoopError("a conditioning is for some steps only")


def _traced(run: SamplerRun) -> Traced:
    """The sampler as numbers that fit into a request, and what it makes of its sigmas."""
    with _traceable(lambda error: f"the sampler cannot be written as numbers: {error}"):
        traced = trace(run, run.guider.inner_model.model_sampling.timestep)
    if traced.recurrence.num_calls == 0:
        raise HostLoopError("the sampler does not call the model")
    return traced


def _as_calls_see(model_options: dict, sigmas: torch.Tensor, in_calls: torch.Tensor) -> dict:
    """The options of a run for its calls of the model, which read the run's sigmas: ComfyUI hands out the tensor that
    the sampler has, and uni_pc writes to it before its first call."""
    options = model_options.get("transformer_options", {})
    if options.get("sample_sigmas") is not sigmas:
        return model_options
    return {**model_options, "transformer_options": {**options, "sample_sigmas": in_calls.to(sigmas.device)}}


@contextmanager
def _traceable(said: Callable[[BaseException], str]) -> Iterator[None]:
    """Around code of a sampler or a model that meets other latents than its own: what it raises keeps the loop in
    ComfyUI. Raises `HostLoopError`."""
    try:
        yield
    except HostLoopError:
        raise
    except UNTRACEABLE as error:
        raise HostLoopError(said(error)) from error


def _ask(refuse: Callable[..., None], *run: object) -> None:
    """What the workers refuse of a run. Raises `HostLoopError`."""
    try:
        refuse(*run)
    except ValueError as error:
        raise HostLoopError(str(error)) from error


def _refuse_idle(plan: ParallelPlan, images: int, num_conds: int) -> None:
    """Raise `HostLoopError` where ComfyUI's loop keeps more batch groups at work: it may cut a batch between
    conditionings."""
    working = sum(bool(work.conds) for work in work_of_groups(plan, images=images, num_conds=num_conds))
    if working < min(plan.batch_groups, images * num_conds):
        raise HostLoopError(
            f"{plan.name} shares out {images} image(s) inside the workers, but prompt and negative here; use cfg=2"
        )


def _inpaint(
    model: comfy.samplers.KSamplerX0Inpaint,
    mask: torch.Tensor | None,
    x: torch.Tensor,
    recurrence: SamplerRecurrence,
) -> dict[str, torch.Tensor] | None:
    """The noise mask with the noise and the latent of what it keeps, each as `x`. Raises `HostLoopError` where those
    are noised in another way than the recurrence says."""
    if mask is None:
        return None
    scaling = model.inner_model.inner_model.scale_latent_inpaint
    taken = inspect.signature(scaling).parameters
    takes_mask = "denoise_mask" in taken or any(each.kind is each.VAR_KEYWORD for each in taken.values())
    told = {"denoise_mask": mask} if takes_mask else {}
    kept = mask.expand_as(x) < 1
    for state in (recurrence.states[0], recurrence.states[recurrence.num_calls // 2]):
        sigma = torch.full((x.shape[0],), state.sigma, device=x.device, dtype=x.dtype)
        other = x + 1.0  # `x` itself is what most models keep at the first sigma
        wanted = scaling(x=other, sigma=sigma, noise=model.noise, latent_image=model.latent_image, **told)
        found = model.noise * state.reading.kept_noise + model.latent_image * state.reading.kept_latent
        if not torch.allclose(found.expand_as(x)[kept], wanted.expand_as(x)[kept], rtol=1e-6, atol=1e-6):
            raise HostLoopError("the model noises what a mask keeps in its own way")
    parts = {"mask": mask, "noise": model.noise, "latent": model.latent_image}
    return {name: part.expand_as(x) for name, part in parts.items()}
