"""ComfyUI's own sampling, with a clock around its loop. Owns what is measured in it, changes nothing of it."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import comfy.samplers
import nodes as comfy_nodes
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP

from ...parallel_runtime.places import without_places
from ...parallel_runtime.planner.automatic import Decision
from .clock import synchronized_s
from .patcher import RemotePatcher
from .pooled_model import PooledModel, Request, noting_loads, recording
from .progress import NodeText
from .resident import HostLoopError, ResidentOptions, sample_in_pool

log = logging.getLogger(__name__)
WRAPPER_KEY = "parallel_dit_clock"
OnStep = Callable[[int, torch.Tensor, torch.Tensor, int], None]


@dataclass(kw_only=True)
class SamplingRecord:
    """What was measured of one sampling run: seconds before its loop, of the loop, between its steps; each request.

    `device` is where ComfyUI itself runs; `began_s` is when the loop began, on the machine's clock. `pooled` is None,
    and `requests` empty, for a MODEL that is not ours. `decision` is the plan that ran, and what it was chosen for;
    `rank_load_s` has the ranks that had to load its weights.
    """

    pooled: PooledModel | None = None
    decision: Decision | None = None
    device: torch.device | None = None
    load_s: float = 0.0
    rank_load_s: dict[int, float] = field(default_factory=dict)
    began_s: float = 0.0
    denoise_s: float = 0.0
    step_s: list[float] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    loop: str = "host"  # where the sampler's loop ran: in ComfyUI, or resident in the workers
    loop_reason: str | None = None  # why a run that could have been resident was not


def sampler_names() -> list[str]:
    """The samplers of the host, in its order."""
    return list(comfy.samplers.KSampler.SAMPLERS)


def scheduler_names() -> list[str]:
    """The schedulers of the host, in its order."""
    return list(comfy.samplers.KSampler.SCHEDULERS)


def pooled_of(model: ModelPatcher) -> PooledModel | None:
    """What a MODEL of ours stands for; None for any other."""
    return model.model.pooled if isinstance(model, RemotePatcher) else None


def decision_of(model: ModelPatcher) -> Decision | None:
    """The plan of the sampling run under way, else of the MODEL, and why; None for a MODEL that is not ours."""
    return (model.of_this_run or model.decision) if isinstance(model, RemotePatcher) else None


def sample(
    model: ModelPatcher, settings: Mapping[str, object], resident: ResidentOptions | None = None
) -> tuple[dict, SamplingRecord]:
    """What KSampler does, `settings` being its own inputs. Returns the latent and what was measured.

    With `resident` the loop runs in the workers where it can, else the record says why not. Raises `ValueError` for a
    latent without images.
    """
    check_latent(settings["latent"], "latent_image")
    record = SamplingRecord(pooled=pooled_of(model), decision=decision_of(model))
    with recording() as record.requests:
        return timed_run(model, settings, record, resident=resident), record


def timed_run(
    model: ModelPatcher,
    settings: Mapping[str, object],
    record: SamplingRecord,
    on_step: OnStep | None = None,
    beside: Sequence[ModelPatcher] = (),
    resident: ResidentOptions | None = None,
) -> dict:
    """One stock sampling run, measured into `record`, with the models `beside` it kept loaded.

    `on_step` gets what ComfyUI's progress and preview would get.
    """
    called_s = time.perf_counter()
    timed = model.clone()
    if beside:
        timed.set_additional_models(WRAPPER_KEY, list(beside))
    loop = _loop(record, resident)
    timed.add_wrapper_with_key(WrappersMP.SAMPLER_SAMPLE, WRAPPER_KEY, _clock(record, model.load_device, on_step, loop))
    with noting_loads() as record.rank_load_s:
        (result,) = comfy_nodes.common_ksampler(timed, **settings)
    record.device = model.load_device
    record.load_s = max(0.0, record.began_s - called_s)
    return result


def check_latent(latent: dict, name: str) -> None:
    """Raise `ValueError` when there is no image in it."""
    shape = list(latent["samples"].shape)
    if shape[0] == 0:
        raise ValueError(f"{name} has shape {shape}, a batch of 0 images; connect a latent of at least one")


def _loop(record: SamplingRecord, resident: ResidentOptions | None) -> Callable[..., torch.Tensor]:
    """Runs a sampler's loop, handed over as ComfyUI's wrappers get it: in the workers if asked and possible."""

    def run(executor: Callable, *arguments: object) -> torch.Tensor:
        if resident is None:
            return executor(*arguments)
        try:
            if record.pooled is None:
                raise HostLoopError("the MODEL is a stock loader's")
            if executor.wrappers[executor.idx + 1 :]:
                raise HostLoopError("another node wraps the sampler")
            samples = sample_in_pool(executor.class_obj, record.pooled, resident, *arguments)
        except HostLoopError as error:
            reason = record.loop_reason = without_places(str(error))  # the sampler's own words may be part of it
            log.info("Parallel Flux Sampler: the loop stays in ComfyUI: %s", reason)
            NodeText().say(f"The loop stays in ComfyUI: {reason}")
            return executor(*arguments)
        record.loop = "resident"
        return samples

    return run


def _clock(
    record: SamplingRecord, device: torch.device, on_step: OnStep | None, loop: Callable[..., torch.Tensor]
) -> Callable[..., torch.Tensor]:
    """A wrapper of the sampler's loop: after models are loaded, before the first step, until after the last."""

    def run(
        executor: Callable,
        guider: comfy.samplers.CFGGuider,
        sigmas: object,
        extra: object,
        callback: OnStep,
        *rest: object,
    ) -> torch.Tensor:
        tell = on_step or callback

        def step_done(step: int, denoised: torch.Tensor, x: torch.Tensor, total_steps: int) -> None:
            now_s = synchronized_s(device)
            record.step_s.append(now_s - marks[-1])
            marks.append(now_s)
            tell(step, denoised, x, total_steps)

        marks = [synchronized_s(device)]
        record.began_s = marks[0]
        record.decision = decision_of(guider.model_patcher)
        samples = loop(executor, guider, sigmas, extra, step_done, *rest)
        record.denoise_s = synchronized_s(device) - marks[0]
        return samples

    return run
