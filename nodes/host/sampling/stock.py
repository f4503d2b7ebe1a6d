"""ComfyUI's own sampling, with a clock around its loop. Owns what is measured in it, changes nothing of it."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ....parallel_runtime.errors import PoolError
from ....parallel_runtime.planner.automatic import Decision
from ....parallel_runtime.proof import Proof
from ..clock import synchronized_s
from ..contract.comfyui import ModelPatcher, NestedTensor, WrappersMP, comfy, comfy_nodes
from ..contract.order import StepCache, skipped_by_stock
from ..model.patcher import RemotePatcher
from ..model.pooled_model import PooledModel
from .late_previews import OnStep
from .run_context import MeasuredRequest, Recorder, run_of

WRAPPER_KEY = "parallel_dit_clock"
OF_SIZES = re.compile(r"size of tensor|shapes cannot be multiplied|to have \d+ channels")  # as torch says them


@dataclass(kw_only=True)
class SamplingRecord:
    """What was measured of one sampling run: seconds before its loop, of the loop, between its steps; each request.

    `device` is where ComfyUI itself runs; `began_s` is when the loop began, on the machine's clock. `pooled` is None,
    and nothing is recorded, for a MODEL that is not ours. `decision` is the plan that ran, and what it was chosen for.
    """

    pooled: PooledModel | None = None
    decision: Decision | None = None
    device: torch.device | None = None
    load_s: float = 0.0
    began_s: float = 0.0
    denoise_s: float = 0.0
    step_s: list[float] = field(default_factory=list)
    recorder: Recorder = field(default_factory=Recorder)
    sizes: dict[str, int] = field(default_factory=dict)  # of what was sampled, as the report has them
    loop: str = "host"  # where the sampler's loop ran: in ComfyUI, or as the worker loop ("resident")
    loop_reason: str | None = None  # why a run stayed in ComfyUI that could have had the worker loop
    proofs: Sequence[Proof] = ()  # what is known of its plan, where ComfyUI's own module computes
    remarks: Sequence[str] = ()  # what the user is told of a plan that was given up
    skipped: StepCache | None = None  # what EasyCache or LazyCache skipped
    step_cache: float = 0.0  # the threshold of SP Config's

    @property
    def requests(self) -> list[MeasuredRequest]:
        """What the run asked of the workers, in order."""
        return self.recorder.requests

    @property
    def rank_load_s(self) -> dict[int, float]:
        """Seconds by rank, of the ranks that had to load its weights."""
        return self.recorder.rank_load_s


def sampler_names() -> list[str]:
    """The samplers of the host, in its order."""
    return list(comfy.samplers.KSampler.SAMPLERS)


def scheduler_names() -> list[str]:
    """The schedulers of the host, in its order."""
    return list(comfy.samplers.KSampler.SCHEDULERS)


def pooled_of(model: ModelPatcher) -> PooledModel | None:
    """What a parallel MODEL stands for; None for any other."""
    return model.model.pooled if isinstance(model, RemotePatcher) else None


def decision_of(model: ModelPatcher) -> Decision | None:
    """The MODEL's plan and why, which a run of it may have another than; None for a MODEL that is not ours."""
    return model.decision if isinstance(model, RemotePatcher) else None


def advice_of(model: ModelPatcher, settings: Mapping[str, object]) -> dict | None:
    """The plan that the planner would rather have for such a run of a parallel MODEL; None where it has none."""
    try:
        return model.advice(settings) if isinstance(model, RemotePatcher) else None
    except ValueError:  # it has sampled: what cannot be weighed needs no advice
        return None


def sample(
    model: ModelPatcher, settings: Mapping[str, object], worker_loop: bool = False
) -> tuple[dict, SamplingRecord]:
    """What KSampler does, `settings` being its own inputs. Returns the latent and what was measured.

    With `worker_loop` the loop runs in the workers where it can, else the record says why not. Raises `ValueError` for
    a latent without images.
    """
    check_latent(settings["latent"], "latent_image")
    record = SamplingRecord(pooled=pooled_of(model), decision=decision_of(model))
    return timed_run(model, settings, record, worker_loop=worker_loop), record


def timed_run(
    model: ModelPatcher,
    settings: Mapping[str, object],
    record: SamplingRecord,
    on_step: OnStep | None = None,
    beside: Sequence[ModelPatcher] = (),
    worker_loop: bool = False,
) -> dict:
    """One stock sampling run, measured into `record`, with the models `beside` kept loaded, too.

    `on_step` gets what ComfyUI's progress and preview would get.
    """
    called_s = time.perf_counter()
    timed = model.clone()
    if isinstance(timed, RemotePatcher):
        timed.recorder, timed.worker_loop = record.recorder, worker_loop and timed.worker_loop
    elif worker_loop:
        record.loop_reason = "the MODEL is a stock loader's"
    if beside:
        timed.set_additional_models(WRAPPER_KEY, list(beside))
    if on_step is not None:
        timed.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, WRAPPER_KEY, _telling(on_step))
    timed.add_wrapper_with_key(WrappersMP.SAMPLER_SAMPLE, WRAPPER_KEY, _clock(record, model.load_device))
    (result,) = comfy_nodes.common_ksampler(timed, **settings)
    record.device, record.sizes = model.load_device, sizes_of(model, result)
    record.load_s = max(0.0, record.began_s - called_s)
    return result


def sizes_of(model: ModelPatcher, latent: dict) -> dict[str, int]:
    """Width and height in pixels, frames of a video's latent, and the batch, of a latent of this model; what it has."""
    shape, form = latent["samples"].shape, model.model.latent_format
    sizes = {"batch": shape[0]}
    if len(shape) >= 4:  # (B, C, H, W), or (B, C, frames, H, W)
        height, width = (each * form.spacial_downscale_ratio for each in shape[-2:])
        sizes |= {"width": width, "height": height}
    if len(shape) == 5 and shape[2] > 1:
        sizes["frames"] = shape[2]
    return sizes


def check_latent(latent: dict, name: str) -> None:
    """Raise `ValueError` when there is no image in it."""
    shape = list(latent["samples"].shape)
    if shape[0] == 0:
        raise ValueError(f"{name} has shape {shape}, a batch of 0 images; connect a latent of at least one")


def told_of_another_model(error: BaseException, model: ModelPatcher, shape: Sequence[int]) -> BaseException:
    """In place of torch's error of sizes in a run with a latent of `shape`, (B, C, H, W) or (B, C, frames, H, W), of
    other channels than the model's: one that names both. Any other error as it is."""
    wanted, name = model.model.latent_format.latent_channels, type(model.model.diffusion_model).__name__
    of_sizes = isinstance(error, RuntimeError) and not isinstance(error, PoolError) and OF_SIZES.search(str(error))
    if not of_sizes or len(shape) < 4 or shape[1] == wanted:
        return error
    return ValueError(
        f"the latent has {shape[1]} channels, {name} takes {wanted}; use the VAE or the empty latent that belongs to "
        f"this model (torch says: {error})"
    )


def _telling(on_step: OnStep) -> Callable[..., torch.Tensor]:
    """A wrapper of a whole run that has `on_step` in place of its callback; of several latents in one it gets each, as
    ComfyUI's own callback does."""

    def run(
        executor: Callable,
        noise: torch.Tensor,
        latent: torch.Tensor,
        sampler: comfy.samplers.Sampler,
        sigmas: torch.Tensor,
        denoise_mask: torch.Tensor | None,
        callback: OnStep | None,
        *rest: object,
        **named: Any,  # noqa: ANN401  ComfyUI's
    ) -> torch.Tensor:
        shapes = named.get("latent_shapes") or ()

        def parts(packed: torch.Tensor) -> torch.Tensor:
            return NestedTensor(comfy.utils.unpack_latents(packed, shapes))

        def tell(step: int, denoised: torch.Tensor, x: torch.Tensor, total_steps: int) -> None:
            on_step(step, parts(denoised), parts(x), total_steps)

        told = tell if len(shapes) > 1 else on_step
        return executor(noise, latent, sampler, sigmas, denoise_mask, told, *rest, **named)

    return run


def _clock(record: SamplingRecord, device: torch.device) -> Callable[..., torch.Tensor]:
    """A wrapper of the sampler's loop: after models are loaded, before the first step, until after the last."""

    def run(
        executor: Callable,
        guider: comfy.samplers.CFGGuider,
        sigmas: object,
        extra: dict,
        callback: OnStep | None,
        *rest: object,
        **named: object,
    ) -> torch.Tensor:
        def step_done(step: int, denoised: torch.Tensor, x: torch.Tensor, total_steps: int) -> None:
            now_s = synchronized_s(device)
            record.step_s.append(now_s - marks[-1])
            marks.append(now_s)
            if context is not None:
                context.step += 1
            if callback is not None:
                callback(step, denoised, x, total_steps)

        context = run_of(extra["model_options"])
        marks = [synchronized_s(device)]
        record.began_s = marks[0]
        samples = executor(guider, sigmas, extra, step_done, *rest, **named)
        record.denoise_s = synchronized_s(device) - marks[0]
        if context is None:
            record.decision = None
        else:  # as of now: a plan whose proof failed was given up for another
            record.decision, record.proofs, record.remarks = context.decision, context.proofs, context.remarks
            record.loop, record.loop_reason = context.loop, context.loop_reason
        record.step_cache = 0.0 if context is None else context.step_cache
        record.skipped = skipped_by_stock(extra["model_options"], steps=len(record.step_s))
        return samples

    return run
