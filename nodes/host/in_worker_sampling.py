"""A whole sampling run inside the pool: whether it can live there, what it is given, and what comes back each step.

ComfyUI prepares everything as it always does: conditionings, sigmas, noise, masks, guidance. One stock call of the
model, answered with nothing, shows what each conditioning becomes at the model's door; that and the sampler's
recurrence go to the workers, which then need the host no more. What this file cannot vouch for stays in ComfyUI's own
loop, and the reason is said.
"""

import logging
from collections.abc import Callable
from dataclasses import replace

import comfy.model_management
import comfy.model_sampling
import comfy.samplers
import torch
from comfy.patcher_extension import WrappersMP

from ...parallel_runtime.checkpoint import HOSTED
from ...parallel_runtime.models.registry import titles
from ...parallel_runtime.plan import ParallelPlan
from ...parallel_runtime.pool.calls import ModelCall
from ...parallel_runtime.pool.in_worker_sampling import Inpaint, InWorkerRun, refuse_long, shares
from ...parallel_runtime.redact_paths import redact_paths
from ...parallel_runtime.sampler_recurrence import SamplerRecurrence
from .cond_tasks import TOGETHER_KEY, tell_idle
from .progress import NodeText
from .run_context import options_of_run, run_of
from .trace_recurrence import SamplerRun, given_tensors, trace
from .workload_from_guider import PATCH, asks_negative

log = logging.getLogger(__name__)

# What makes a conditioning differ from step to step, from place to place, or need the host at each step.
BY_STEP = {
    "area": "a conditioning has an area",
    "mask": "a conditioning has a mask",
    "strength": "a conditioning has a strength",
    "control": "a ControlNet",
    "hooks": "a conditioning has hooks",
    "gligen": "GLIGEN",
    "timestep_start": "a conditioning is for some steps only",
    "timestep_end": "a conditioning is for some steps only",
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
# Parts of ComfyUI's model that are read before the first step alone, whoever replaced them.
READ_BEFORE = ("model_sampling", "latent_format", "concat_keys", "diffusion_model.params.")
# Wrappers around the whole run do not see what happens inside it.
OUTSIDE = {WrappersMP.OUTER_SAMPLE, WrappersMP.PREPARE_SAMPLING, WrappersMP.SAMPLER_SAMPLE}


class HostLoopError(ValueError):
    """The run must stay in ComfyUI's loop; the message says why."""


class InWorkerSampler(comfy.samplers.KSAMPLER):
    """A stock sampler with its loop in the workers. What cannot live there it samples as the stock one does.

    Noise, masks and callbacks are prepared by the stock class; our sampler function takes the place of its own. After a
    run `loop` says where it was, and `reason` why it stayed in ComfyUI.
    """

    def __init__(self, stock: comfy.samplers.Sampler) -> None:
        is_known = type(stock) is comfy.samplers.KSAMPLER
        super().__init__(self._run, *((stock.extra_options, stock.inpaint_options) if is_known else ()))
        self.loop = "host"
        self.reason = None if is_known else f"the sampler is a {type(stock).__name__}"
        self._stock = stock

    def sample(
        self,
        guider: comfy.samplers.CFGGuider,
        sigmas: torch.Tensor,
        extra_args: dict,
        *arguments: object,
        **named: object,
    ) -> torch.Tensor:
        """As any sampler's. Raises `PoolError` when a worker fails, and ComfyUI's interrupt when the user cancels.

        That a run must stay in ComfyUI's loop is known before any rank is asked, and before torch's random state moves.
        """
        try:
            _refuse(guider, extra_args["model_options"], self.reason)
            samples = super().sample(guider, sigmas, extra_args, *arguments, **named)
        except HostLoopError as error:
            self.reason = redact_paths(str(error))  # the sampler's own words may be part of it
            log.info("Parallel Sampler: the loop stays in ComfyUI: %s", self.reason)
            NodeText().say(f"The loop stays in ComfyUI: {self.reason}")
            return self._stock.sample(guider, sigmas, extra_args, *arguments, **named)
        self.loop = "resident"
        return samples

    def _run(
        self,
        model: comfy.samplers.KSamplerX0Inpaint,
        x: torch.Tensor,
        sigmas: torch.Tensor,
        *,
        extra_args: dict,
        callback: Callable[[dict], None],
        disable: bool,
        **extra_options: object,
    ) -> torch.Tensor:
        """What stands where the stock class has its sampler function: (B, C, H, W) noise in, the sampled latent out."""
        guider, model_options = model.inner_model, extra_args["model_options"]
        context = run_of(model_options)
        run = SamplerRun(sampler=self._stock, guider=guider, sigmas=sigmas, extra_args=extra_args)
        recurrence, sigmas_left = _recurrence(run)
        if x.ndim != 4 or x.shape[2] % PATCH or x.shape[3] % PATCH:
            raise HostLoopError(f"a latent of {tuple(x.shape[2:])} does not divide into tokens of {PATCH}")
        inpaint = _inpaint(model, extra_args["denoise_mask"], x, sigmas)
        conds = tuple(_cond(guider, name, extra_args, x, sigmas[:1]) for name in _cond_names(guider, model_options))
        if len({tuple(cond.tensors["img"].shape) for cond in conds}) > 1:
            raise HostLoopError("one conditioning has other reference images than the other")
        _refuse_idle(context.plan, x.shape[0], len(conds))
        tell_idle(context, len(conds) * x.shape[0])
        given = given_tensors(run, recurrence, x)

        def step_done(step: int, tokens: torch.Tensor) -> None:
            denoised = from_tokens(tokens, x.shape).to(x.device)
            callback({"i": step, "denoised": denoised, "x": denoised})

        result = context.sample(
            InWorkerRun(
                recurrence=recurrence,
                conds=conds,
                cfg=float(guider.cfg),
                given={number: to_tokens(tensor).float() for number, tensor in given.items()},
                inpaint=inpaint,
            ),
            on_step=step_done,
            check_cancelled=comfy.model_management.throw_exception_if_processing_interrupted,
        )
        sigmas.copy_(sigmas_left)
        return from_tokens(result, x.shape).to(device=x.device, dtype=x.dtype)


def _refuse(guider: comfy.samplers.CFGGuider, model_options: dict, reason: str | None) -> None:
    """Raise `HostLoopError` for a MODEL, sampler (for that `reason`), guider or conditionings that need the host.

    `model_options` are the sampler's: a wrapper around it may have changed those of the guider.
    """
    context = run_of(model_options)
    if context is None or vars(guider.inner_model).get("pooled") is not context.model:
        raise HostLoopError("the MODEL is a stock loader's")
    if context.model.spec.adapter == HOSTED:
        raise HostLoopError(f"the loop in the workers runs {titles()} alone")
    if reason is not None:
        raise HostLoopError(reason)
    _refuse_guider(guider, model_options)
    _refuse_model(guider)
    _refuse_conds(guider, model_options)


def _refuse_guider(guider: comfy.samplers.CFGGuider, model_options: dict) -> None:
    """Raise `HostLoopError` for what changes from step to step by other hands than the sampler's."""
    if type(guider) is not comfy.samplers.CFGGuider:
        raise HostLoopError(f"the guider is a {type(guider).__name__}")
    for name, reason in OPTIONS.items():
        if model_options.get(name):
            raise HostLoopError(reason)
    wrappers = model_options.get("transformer_options", {}).get("wrappers", {})
    inside = [key for kind, by_key in wrappers.items() if kind not in OUTSIDE for key, found in by_key.items() if found]
    inside = [key for key in inside if key != TOGETHER_KEY]  # ours, for the host's loop
    if inside:
        raise HostLoopError(f"a node wraps the model's calls ({', '.join(map(str, inside))})")


def _refuse_model(guider: comfy.samplers.CFGGuider) -> None:
    """Raise `HostLoopError` unless the model denoises as a flow does: the latent less sigma times what it says."""
    flow, sampling = comfy.model_sampling.CONST, type(guider.inner_model.model_sampling)
    if not issubclass(sampling, flow) or sampling.calculate_denoised is not flow.calculate_denoised:
        raise HostLoopError("the model's sampling is not a flow's")
    for name in guider.model_patcher.object_patches:
        if not name.startswith(READ_BEFORE):
            raise HostLoopError(f"a node replaces the model's {name}")


def _refuse_conds(guider: comfy.samplers.CFGGuider, model_options: dict) -> None:
    """Raise `HostLoopError` for conditionings that are not one and the same at each step and place."""
    for name in _cond_names(guider, model_options):
        entries = guider.conds[name] or []
        if len(entries) != 1:
            raise HostLoopError(f"the {name} conditioning has {len(entries)} parts")
        for key, reason in BY_STEP.items():
            if entries[0].get(key) is not None:
                raise HostLoopError(reason)


def _cond_names(guider: comfy.samplers.CFGGuider, model_options: dict) -> tuple[str, ...]:
    return ("positive", "negative") if asks_negative(guider.cfg, model_options) else ("positive",)


def _recurrence(run: SamplerRun) -> tuple[SamplerRecurrence, torch.Tensor]:
    """The sampler as numbers that fit into a request, and what it makes of its sigmas."""
    try:
        recurrence, sigmas_left = trace(run, run.guider.inner_model.model_sampling.timestep)
    except UNTRACEABLE as error:
        raise HostLoopError(f"the sampler cannot be written as numbers: {error}") from error
    try:
        refuse_long(recurrence)
    except ValueError as error:
        raise HostLoopError(str(error)) from error
    if recurrence.num_calls == 0:
        raise HostLoopError("the sampler does not call the model")
    return recurrence, sigmas_left


def _cond(
    guider: comfy.samplers.CFGGuider,
    name: str,
    extra_args: dict,
    x: torch.Tensor,
    sigma: torch.Tensor,
) -> ModelCall:
    """What ComfyUI would send the workers for one conditioning in the first step."""
    calls: list[ModelCall] = []
    looking = replace(run_of(extra_args["model_options"]), captured=calls)
    options = options_of_run(extra_args["model_options"], looking)
    sigma = sigma.expand(x.shape[0])
    comfy.samplers.calc_cond_batch(guider.inner_model, [guider.conds[name]], x, sigma, options)
    if len(calls) != 1:
        raise HostLoopError(f"the {name} conditioning makes {len(calls)} calls of the model")
    call = calls[0]
    tokens = to_tokens(x).to(call.tensors["img"])
    rows, width = tokens.shape[1:]
    times = guider.inner_model.model_sampling.timestep(sigma).float()
    if not torch.equal(call.tensors["img"][:, :rows, :width], tokens) or not torch.equal(
        call.tensors["timesteps"].to(times.device), times
    ):
        raise HostLoopError("the latent reaches the model changed")
    return call


def _refuse_idle(plan: ParallelPlan, images: int, num_conds: int) -> None:
    """Raise `HostLoopError` where ComfyUI's loop keeps more batch groups at work: it may cut a batch between
    conditionings."""
    working = sum(bool(share.conds) for share in shares(plan, images=images, num_conds=num_conds))
    if working < min(plan.batch_groups, images * num_conds):
        raise HostLoopError(
            f"{plan.name} shares out {images} image(s) inside the workers, but prompt and negative here; use cfg=2"
        )


def _inpaint(
    model: comfy.samplers.KSamplerX0Inpaint, mask: torch.Tensor | None, x: torch.Tensor, sigmas: torch.Tensor
) -> Inpaint | None:
    """The noise mask's tensors; what is not to be sampled is noise * sigma + latent * (1 - sigma) at every sigma."""
    if mask is None:
        return None
    scaling = model.inner_model.inner_model.scale_latent_inpaint
    for sigma in (sigmas[0], sigmas[len(sigmas) // 2]):
        wanted = scaling(x=x, sigma=sigma.expand(x.shape[0]), noise=model.noise, latent_image=model.latent_image)
        found = sigma * model.noise + (1.0 - sigma) * model.latent_image
        if not torch.allclose(found, wanted, rtol=1e-6, atol=1e-6):
            raise HostLoopError("the model noises what a mask keeps in its own way")
    parts = (mask, model.noise, model.latent_image)
    mask, noise, latent = (to_tokens(part.expand_as(x)).float() for part in parts)
    return Inpaint(mask=mask, noise=noise, latent=latent)


def to_tokens(latent: torch.Tensor) -> torch.Tensor:
    """(B, C, H, W) to (B, H / 2 * W / 2, C * 4), channels outermost within a token, as ComfyUI's module has them."""
    parts = latent.unflatten(3, (-1, PATCH)).unflatten(2, (-1, PATCH))  # (B, C, h, 2, w, 2)
    return parts.permute(0, 2, 4, 1, 3, 5).flatten(3, 5).flatten(1, 2)


def from_tokens(tokens: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The way back, to a latent of `shape`."""
    _, channels, height, width = shape
    parts = tokens.unflatten(1, (height // PATCH, width // PATCH)).unflatten(3, (channels, PATCH, PATCH))
    return parts.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)
