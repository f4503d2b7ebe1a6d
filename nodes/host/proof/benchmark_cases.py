"""What a benchmark runs: a parallel MODEL under other plans, and stock ComfyUI's own model of the same file.

Owns how each is made and how one sampling run of it is measured. Does not own the order of runs nor what is compared.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from ....parallel_runtime.checkpoint import FAST, FP8
from ....parallel_runtime.plan import ParallelPlan
from ....parallel_runtime.planner.automatic import Decision
from ..contract.comfyui import ModelPatcher, NestedTensor, check_cancelled, comfy
from ..contract.refusals import refuse_in
from ..contract.version import refuse_off
from ..model.convert_stock_model import copy_changes
from ..model.patcher import RemotePatcher
from ..model.source import refuse_unplanned
from ..sampling.run_context import Recorder
from ..sampling.stock import SamplingRecord, pooled_of, timed_run
from ..sampling.workload_from_guider import work_of_settings

SLOW_ATTENTION = (
    "stock ComfyUI ran without --use-pytorch-cross-attention, and its own attention is slower on a CPU; start ComfyUI "
    "with that flag for a comparison of equals"
)


def require_ours(model: ModelPatcher) -> RemotePatcher:
    """The MODEL when it is ours. Raises `ValueError` for any other."""
    refuse_off("benchmark")
    if not isinstance(model, RemotePatcher):
        raise ValueError(
            f"this MODEL is a {type(model).__name__} without workers; "
            "connect Parallel Model Loader or Parallelize Model"
        )
    return model


def plan_of_settings(model: RemotePatcher, settings: Mapping[str, object]) -> ParallelPlan:
    """The plan that a sampling run with KSampler's inputs has."""
    return model.decision_for(work_of_settings(model, settings, model.decision)).plan


def under_plan(model: RemotePatcher, plan: ParallelPlan) -> RemotePatcher:
    """The same MODEL, weights and all, under another plan. Raises `ValueError` for one that cannot be its plan."""
    devices = model.model.pooled.devices
    if plan.ranks > len(devices):
        raise ValueError(
            f"{plan.describe()} needs {plan.ranks} ranks, this MODEL has {len(devices)}; name more devices in SP Config"
        )
    if plan.layout.kind != model.plan.layout.kind:
        raise ValueError(
            f"{plan.describe()} has the weights {plan.layout.name}, this MODEL has them {model.plan.layout.name}; "
            "compare plans of the same weights, or set weights and stages in SP Config"
        )
    refuse_unplanned(model.model.diffusion_model, plan)
    return model.under(Decision(plan=plan))


def stock_copy(model: RemotePatcher) -> ModelPatcher:
    """Stock ComfyUI's model of the same file in the same dtype, with what was applied to ours. Raises `ValueError`."""
    if model.side_branch:
        raise refuse_in("lora=side branch in SP Config", "stock ComfyUI has no LoRA beside the weights")
    spec = model.model.pooled.spec
    options = {"dtype": FP8.get(spec.kept) or getattr(torch, spec.dtype), "fp8_optimizations": spec.kept.endswith(FAST)}
    if spec.checkpoint:
        copy, *_ = comfy.sd.load_checkpoint_guess_config(
            spec.path, output_vae=False, output_clip=False, model_options=options
        )
    else:
        copy = comfy.sd.load_diffusion_model(spec.path, model_options=options)
    copy_changes(model, copy)
    return copy


def attention_is_slow(device: torch.device) -> bool:
    """Whether ComfyUI on this device does without torch's attention."""
    return device.type == "cpu" and not comfy.model_management.pytorch_attention_enabled()


def numbers_of(samples: torch.Tensor | NestedTensor) -> torch.Tensor:
    """A latent in fp32 on the CPU; the parts of a nested one, as of video and sound, as one row of numbers."""
    if not samples.is_nested:
        return samples.float().cpu()
    return torch.cat([part.float().cpu().flatten() for part in samples.unbind()])


def sampled(
    model: ModelPatcher, settings: Mapping[str, object], worker_loop: bool = False, *, trace: bool = False
) -> tuple[torch.Tensor, SamplingRecord]:
    """One sampling run: its latent on the CPU, and what was measured. Shows no preview and moves no progress bar.

    With `worker_loop` the loop runs in the workers where it can, else the record says why not. With `trace` each rank
    traces its requests.
    """
    record = SamplingRecord(pooled=pooled_of(model), recorder=Recorder(trace=trace))
    latent = timed_run(model, settings, record, on_step=lambda *_: None, worker_loop=worker_loop)
    return numbers_of(latent["samples"]), record


def traced(model: ModelPatcher, settings: Mapping[str, object]) -> list[bytes]:
    """Each rank's Chrome trace, gzipped JSON, of the last request of a run of one step; none where it has no step."""
    _, record = sampled(model, {**settings, "steps": 1}, trace=True)
    return [data for request in record.requests[-1:] for data in request.traces.values()]


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Run what is inside with so many CPU threads in this process; None leaves them as they are."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class RunsProgress:
    """ComfyUI's progress bar over the runs of a benchmark."""

    def __init__(self, total: int) -> None:
        self._bar = comfy.utils.ProgressBar(total)

    def step(self) -> None:
        """One run more. Raises ComfyUI's interrupt when the user cancels."""
        check_cancelled()
        self._bar.update(1)
