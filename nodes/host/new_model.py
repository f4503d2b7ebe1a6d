"""How a MODEL of ours is made of a file, and where each of its sampling runs gets its context.

Owns who is asked for a plan, and when, and that a run's loop goes to the workers where it can. What a plan is chosen by
is the chooser's, what a run is asked for workload_from_guider.py's.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import Protocol, TypeAlias

import torch

from ...parallel_runtime.checkpoint import FP8, read_header
from ...parallel_runtime.models.hosted.first_block import refuse_stages_with_cache, refuse_step_cache
from ...parallel_runtime.models.registry import find_family
from ...parallel_runtime.plan import ParallelPlan
from ...parallel_runtime.planner.automatic import Decision
from ...parallel_runtime.planner.choose import AnyModel
from ...parallel_runtime.planner.counted import CountedModel
from ...parallel_runtime.planner.counting import Counted, Counts, usual_work_of
from ...parallel_runtime.planner.shapes import ModelShape, Work
from ...parallel_runtime.report.build import plan_part
from ...parallel_runtime.report.compare import suggestion
from .comfyui import WrapperExecutor, WrappersMP, comfy
from .cond_tasks import TOGETHER_KEY, calc_together
from .device_memory import DeviceMemory, needed_memory
from .flux_model import RemoteFlux
from .flux_source import Source, read_source
from .hosted_source import HostedSource, read_hosted, refuse_unplanned, this_comfyui
from .in_worker_sampling import in_workers as to_workers
from .live_times import LIVE
from .patcher import RemotePatcher
from .pooled_model import PooledModel
from .pools import POOLS, Devices
from .readable_weights import readable_weights
from .refusals import check_controlnets, check_skipped_layers
from .remote_hosted import remote_hosted
from .run_context import RUN_KEY, begun
from .version import off, refuse_off
from .workload_from_guider import asks_both, work_of_run, work_of_settings

REMEMBERED = 64  # decisions of a MODEL, by work
PREDICTED_CLEARLY = 1.1  # times faster: what is predicted to be less may be none
COUNTS = Counts()


class Chooser(Protocol):
    """Says which plan a MODEL has, and afterwards which one each of its sampling runs."""

    def plan_for(self, model: ModelShape, work: Work) -> Decision:
        """The plan that the weights are loaded for; raises `ValueError` for one that fits neither devices nor model."""

    def plan_for_any(self, name: str, unshared: str, *, whole_batches: bool, count: Callable[[], Counted]) -> Decision:
        """The same for a model that ComfyUI's own module computes, by the name of its file.

        `unshared`: why no ranks can share its tokens; "" where they can. `count` has it counted for the planner, which
        takes seconds, and raises `ValueError` where it cannot be.
        """

    def plan_of_run(self, model: AnyModel, work: Work, held: ParallelPlan) -> Decision:
        """The plan of one run of `work`, which weights loaded for `held` serve. Asked only if `held` was weighed."""

    def advised(self, model: ModelShape, work: Work) -> Decision | None:
        """What would have been chosen for `work`; None where it was, or nothing is known of the devices."""


Reader: TypeAlias = Callable[[str, str, Devices], Source | HostedSource]


def read_any(path: str, weight_dtype: str, devices: Devices) -> Source | HostedSource:
    """Recognise the file at `path`, whose family says who computes it: blocks of ours, or ComfyUI's modules.

    Weights that are to be kept in fp8 are ComfyUI's modules'.

    Arguments as `read_source`. Raises `ValueError` when the file is missing or broken, or no diffusion model.
    """
    return (read_source if _is_own(path, weight_dtype) else read_hosted)(path, weight_dtype, devices)


def read_checkpoint(path: str, weight_dtype: str, devices: Devices) -> Source | HostedSource:
    """As `read_any` for a file that Load Checkpoint read, whose other parts may say more of the diffusion model."""
    if _is_own(path, weight_dtype):
        return read_source(path, weight_dtype, devices)
    return read_hosted(path, weight_dtype, devices, checkpoint=True)


def _is_own(path: str, weight_dtype: str) -> bool:
    """Whether blocks of ours compute a file."""
    if weight_dtype in FP8 or off("flux"):
        return False
    return find_family(read_header(path), comfyui=not off("hosted")) is not None


def remote_patcher(
    path: str,
    weight_dtype: str,
    *,
    devices: Devices,
    chooser: Chooser,
    side_branch: bool,
    compiled: bool = False,
    step_cache: float = 0.0,
    in_workers: bool = True,
    attention: str = "",
    read: Reader = read_any,
) -> RemotePatcher:
    """The MODEL for the file at `path`, over `devices`, with the plans that `chooser` says.

    `side_branch` runs LoRAs beside the weights, `compiled` the blocks as graphs; `step_cache` is the change of
    the first block's output below which the other blocks are skipped. `in_workers`: samplers run their loop in the
    workers where they can. `attention`: the kernel of a package, where one was asked for. `read` chooses who computes
    it: `read_hosted` has ComfyUI's own modules compute any model.

    Raises `ValueError` when the file cannot be used, or the plan or a step cache does not fit it.
    """
    refuse_off("parallel")
    source = read(path, weight_dtype, devices)
    if step_cache and isinstance(source, Source):
        raise ValueError(
            f"step_cache={step_cache:g}: blocks of this pack compute {os.path.basename(path)}, and keep no step cache; "
            "set step_cache to 0, or use the nodes EasyCache or LazyCache"
        )
    if attention and isinstance(source, Source):
        raise ValueError(
            f"attention={attention}: blocks of this pack compute {os.path.basename(path)}, with torch's kernels; set "
            "attention in SP Config to auto"
        )
    decision = decide_for(source, chooser)
    pooled = PooledModel(
        devices=devices,
        spec=source.spec,
        plan=decision.plan,
        sizes=source.sizes,
        num_heads=source.num_heads,
        shares_tokens=isinstance(source, Source) or not source.unshared,
        rounding_attention="" if isinstance(source, Source) else source.rounding_attention,
        widened_formats=() if isinstance(source, Source) else source.widened_formats,
        keeps_state=isinstance(source, HostedSource) and source.keeps_state,
    )

    def make() -> RemotePatcher:
        management = comfy.model_management
        model = remote_hosted(source, pooled) if isinstance(source, HostedSource) else RemoteFlux(source, pooled)
        root = RemotePatcher(model, management.get_torch_device(), management.unet_offload_device())
        root.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, TOGETHER_KEY, calc_together)
        root.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, RUN_KEY, with_context)
        return root

    patcher = POOLS.root(pooled.weights, make).clone()
    if isinstance(source, HostedSource):
        refuse_unplanned(patcher.model.diffusion_model, decision.plan)
        refuse_step_cache(patcher.model.diffusion_model, step_cache)
        refuse_stages_with_cache(decision.plan.pipefusion, step_cache)
    patcher.decision, patcher.origin = decision, object()
    patcher.memory_text = memory_for(source, decision, devices).text
    if decision.model is not None and decision.plan.ranks > 1:
        patcher.choose_again = lru_cache(REMEMBERED)(partial(chooser.plan_of_run, decision.model, held=decision.plan))
    patcher.side_branch, patcher.compiled = side_branch, compiled
    patcher.step_cache, patcher.in_workers, patcher.attention = step_cache, in_workers, attention
    if isinstance(source, Source):
        weighed = replace(decision, work=source.work, model=source.shape)
        patcher.advise = partial(_advised, chooser=chooser, weighed=weighed)
    return patcher


def _advised(
    patcher: RemotePatcher, settings: Mapping[str, object], *, chooser: Chooser, weighed: Decision
) -> dict | None:
    """The plan that is predicted to be clearly quicker at such a run, as `suggestion` has it; None where none is."""
    work = work_of_settings(patcher, settings, weighed)
    if work is None or weighed.model is None or isinstance(weighed.model, CountedModel):
        return None
    better = chooser.advised(weighed.model, work)
    gain = None if better is None else better.gain_over(patcher.plan)
    if better is None or gain is None or gain < PREDICTED_CLEARLY:
        return None
    return suggestion(plan_part(better.plan), factor=gain, by="predicted")


def decide_for(source: Source | HostedSource, chooser: Chooser) -> Decision:
    """The plan that `chooser` takes for a file. Raises `ValueError` for one that fits neither the devices nor it."""
    if not isinstance(source, HostedSource):
        return chooser.plan_for(source.shape, source.work)
    path = source.spec.path
    return chooser.plan_for_any(
        os.path.basename(path),
        source.unshared,
        whole_batches=source.whole_batches,
        count=lambda: COUNTS.of(path, source.spec.dtype, this_comfyui()).with_weights(source.sizes.total),
    )


def memory_for(source: Source | HostedSource, decision: Decision, devices: Devices) -> DeviceMemory:
    """What the plan of `decision` takes of each device, before anything is loaded."""
    model: AnyModel | None = decision.model
    work = decision.work
    if isinstance(source, Source):
        model, work = source.shape, source.work
    elif model is None and (counted := COUNTS.known(source.spec.path, source.spec.dtype, this_comfyui())):
        counted = counted.with_weights(source.sizes.total)
        model, work = counted.model, usual_work_of(counted)
    return needed_memory(decision.plan, devices, source.sizes, model, work)


def with_context(
    executor: WrapperExecutor,
    noise: torch.Tensor,
    latent: torch.Tensor,
    sampler: comfy.samplers.Sampler,
    sigmas: torch.Tensor,
    *more: object,
    **named: object,
) -> torch.Tensor:
    """A wrapper of ComfyUI's `outer_sample`: a whole sampling run with a context of its own.

    The last moment before models are loaded, and the first at which latent, conditionings, cfg and sigmas are known.
    """
    guider = executor.class_obj
    patcher = guider.model_patcher
    if not isinstance(patcher, RemotePatcher):  # a guider may run another model with our options
        return executor(noise, latent, sampler, sigmas, *more, **named)
    check_controlnets(guider.conds)
    _refuse_beside(patcher, vars(guider).values())
    work = work_of_run(guider, noise, sigmas, patcher.decision)
    run = patcher.new_run(patcher.decision_for(work))
    run.guided, run.images, run.steps = asks_both(guider), noise.shape[0], max(1, len(sigmas) - 1)
    check_skipped_layers(patcher.written(), sigmas.tolist()[:-1], guided=_is_guided(guider))
    LIVE.begins(run)
    with begun(guider.model_options, run), readable_weights(patcher.model, patcher.patches, guider.conds):
        sampler = to_workers(sampler, run) if patcher.in_workers else sampler
        return executor(noise, latent, sampler, sigmas, *more, **named)


def _is_guided(guider: object) -> bool:
    """Whether a run computes its negative conditioning, as ComfyUI's guiders do unless cfg is 1."""
    return vars(guider).get("cfg") != 1.0 or "disable_cfg1_optimization" in guider.model_options


def _refuse_beside(patcher: RemotePatcher, others: Iterable[object]) -> None:
    """Raise `ValueError` for a MODEL of another loader on the same weights with other changes of them.

    ComfyUI has one model for both and would give it one's changes alone. Of one loader stock does the same.
    """
    for other in others:
        if isinstance(other, RemotePatcher) and other.model is patcher.model and other.origin is not patcher.origin:
            if other.patch_set().name != patcher.patch_set().name:
                name = os.path.basename(patcher.model.pooled.spec.path)
                raise ValueError(
                    f"the guider has two MODELs of {name} on the same workers with different LoRAs, and both would get "
                    "those of one; use Load Diffusion Model for one of them, or other devices in its SP Config"
                )
