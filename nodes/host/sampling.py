"""ComfyUI's own sampling, with a clock around its loop. Owns what is measured in it, changes nothing of it."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

import comfy.samplers
import nodes as comfy_nodes
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP

from .clock import synchronized_s
from .patcher import RemotePatcher
from .pooled_model import Call, PooledModel

WRAPPER_KEY = "parallel_dit_clock"


@dataclass(kw_only=True)
class SamplingRecord:
    """What was measured of one sampling run: seconds of the whole loop, between its steps, and each model call.

    `pooled` is None, and `calls` empty, for a MODEL that is not ours.
    """

    pooled: PooledModel | None = None
    denoise_s: float = 0.0
    step_s: list[float] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)


def sampler_names() -> list[str]:
    """The samplers of the host, in its order."""
    return list(comfy.samplers.KSampler.SAMPLERS)


def scheduler_names() -> list[str]:
    """The schedulers of the host, in its order."""
    return list(comfy.samplers.KSampler.SCHEDULERS)


def sample(model: ModelPatcher, latent: dict, **settings: object) -> tuple[dict, SamplingRecord]:
    """What KSampler does, `settings` being its own inputs. Returns the latent and what was measured."""
    record = SamplingRecord()
    timed = model.clone()
    timed.add_wrapper_with_key(WrappersMP.SAMPLER_SAMPLE, WRAPPER_KEY, _clock(record, model.load_device))
    recording = nullcontext([])
    if isinstance(timed, RemotePatcher):
        record.pooled = timed.model.pooled
        recording = record.pooled.recording()
    with recording as record.calls:
        (result,) = comfy_nodes.common_ksampler(timed, latent=latent, **settings)
    return result, record


def _clock(record: SamplingRecord, device: torch.device) -> Callable[..., torch.Tensor]:
    """A wrapper of the sampler's loop: after models are loaded, before the first step, until after the last."""

    def run(
        executor: Callable, guider: object, sigmas: object, extra: object, callback: Callable, *rest: object
    ) -> torch.Tensor:
        def step_done(step: int, denoised: torch.Tensor, x: torch.Tensor, total_steps: int) -> None:
            now_s = synchronized_s(device)
            record.step_s.append(now_s - marks[-1])
            marks.append(now_s)
            callback(step, denoised, x, total_steps)

        marks = [synchronized_s(device)]
        samples = executor(guider, sigmas, extra, step_done, *rest)
        record.denoise_s = synchronized_s(device) - marks[0]
        return samples

    return run
