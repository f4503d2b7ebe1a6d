"""How a parallel MODEL is made of a file, and where each of its sampling runs gets its context.

Owns when a plan is chosen, and by what, and that a run's loop goes to the workers where it can. What a plan is chosen
by is the chooser's, what a run is asked for workload_from_guider.py's.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from threading import Thread
from typing import Any, Protocol, TypeAlias

import torch

from ....parallel_runtime.checkpoint import ModelSpec
from ....parallel_runtime.devices import DeviceSelection
from ....parallel_runtime.models.hosted.calls import RUN_KEY
from ....parallel_runtime.models.hosted.first_block import refuse_stages_with_cache, refuse_step_cache
from ....parallel_runtime.models.hosted.random_calls import IMAGES
from ....parallel_runtime.plan import ParallelPlan
from ....parallel_runtime.planner.automatic import Decision
from ....parallel_runtime.planner.counted import CountedModel
from ....parallel_runtime.planner.counting import Counted, Counts, Tick, usual_work_of
from ....parallel_runtime.planner.kept_counts import KeptCounts
from ....parallel_runtime.planner.machine import whole_bytes
from ....parallel_runtime.planner.work import Work
from ....parallel_runtime.report.build import plan_part
from ....parallel_runtime.report.compare import suggestion
from ..contract.comfyui import ModelPatcher, WrapperExecutor, WrappersMP, check_cancelled, comfy
from ..contract.refusals import check_controlnets, check_skipped_layers, have_controlnet
from ..contract.version import refuse_off
from ..panel.live_times import LIVE
from ..panel.progress import NodeText
from ..proof.begin_tries import LastRun, Tunable, with_tries
from ..sampling.late_previews import with_late_callback
from ..sampling.run_context import begun
from ..sampling.stock import check_latent, sizes_of, told_of_another_model
from ..sampling.worker_loop import to_workers
from ..sampling.workload_from_guider import asks_both, work_of_run, work_of_settings
from ..tasks.cond_tasks import TOGETHER_KEY, calc_together
from .changed_model import sample_by
from .changed_modules import have_packs_around
from .found_plans import LOOKING
from .measures import held_by_memory, refuse_beyond_host, refuse_beyond_room
from .models_beside import models_beside
from .patcher import RemotePatcher
from .pooled_model import DeviceMemory, PooledModel, needed_memory
from .pools import POOLS, Devices
from .readable_weights import readable_weights
from .source import HostedSource, read_hosted, refuse_unplanned, this_comfyui
from .stand_in import remote_hosted

REMEMBERED = 64  # decisions of a MODEL, by work
PREDICTED_CLEARLY = 1.1  # times faster: what is predicted to be less may be none
COUNTS = Counts(KeptCounts.of_user())


class Chooser(Protocol):
    """What SP Config asks for: the devices, the options, which plan a MODEL has, and which each of its sampling runs.

    A protocol, as `ParallelChoice` is in nodes/, the layer above.
    `side_branch` runs LoRAs as side branches, `compiled` the blocks as graphs; `step_cache` is the change of the
    first block's output below which the other blocks are skipped. `worker_loop`: samplers run their loop in the workers
    where they can. `attention`: the kernel of a package, "" for none. `tries`: plans that auto predicts to be near are
    tried before a run of many steps. `shares`: how much each device computes, () for equal ones, None as they are
    measured. `exchange`: as what heads travel between ranks.
    """

    @property
    def selection(self) -> DeviceSelection: ...
    @property
    def side_branch(self) -> bool: ...
    @property
    def compiled(self) -> bool: ...
    @property
    def step_cache(self) -> float: ...
    @property
    def worker_loop(self) -> bool: ...
    @property
    def attention(self) -> str: ...
    @property
    def tries(self) -> bool: ...
    @property
    def shares(self) -> tuple[int, ...] | None: ...
    @property
    def exchange(self) -> str: ...

    def decision_for_model(
        self, unshared: str, *, whole_batches: bool, weight_bytes: int, beside: float, count: Callable[[], Counted]
    ) -> Decision:
        """The plan that the weights are loaded for; raises `ValueError` for one that does not fit the devices.

        `unshared`: why no ranks can share the model's tokens; "" where they can. `beside`: how many models of this size
        the prompt has besides. `count` has it counted for the planner, which takes seconds, and raises `ValueError`
        where it cannot be.
        """

    def plan_of_run(self, model: CountedModel, work: Work, held: ParallelPlan, beside: float) -> Decision:
        """The plan of one run of `work`, which weights loaded for `held` serve. Asked only if `held` was weighed."""

    @property
    def looks(self) -> bool:
        """Whether a plan is looked for where the model's class has none."""

    @property
    def advises(self) -> bool:
        """Whether `advised` may have something to say."""

    def advised(self, model: CountedModel, work: Work, beside: float) -> Decision | None:
        """What would have been chosen for `work`; None where it was, or nothing is known of the devices."""


Reader: TypeAlias = Callable[[str, str, Devices], HostedSource]


def remote_patcher(path: str, weight_dtype: str, asked: Chooser, *, read: Reader = read_hosted) -> RemotePatcher:
    """The MODEL for the file at `path`, as SP Config asks for it.

    Raises `ValueError` when the file cannot be used, or the plan or a step cache does not fit it.
    """
    refuse_off("parallel")
    devices, shares = asked.selection.devices, asked.shares
    source = read(path, weight_dtype, devices)
    source = LOOKING.with_found(source) if asked.looks else source
    beside = models_beside(path)
    decision = decide_for(source, asked, beside=beside, tick=_while_counted(source))
    refuse_unfit(source, decision.plan, asked)
    pooled = PooledModel(
        devices=devices,
        spec=source.spec,
        plan=decision.plan,
        sizes=source.sizes,
        num_heads=source.num_heads,
        shares_tokens=not source.unshared,
        rounding_attention=source.rounding_attention,
        widened_formats=source.widened_formats,
        keeps_state=source.keeps_state,
        found_by=source.found_by,
    )

    def make() -> RemotePatcher:
        management = comfy.model_management
        model = remote_hosted(source, pooled)
        root = RemotePatcher(model, management.get_torch_device(), management.unet_offload_device())
        root.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, TOGETHER_KEY, calc_together)
        root.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, RUN_KEY, with_context)
        return root

    root = POOLS.root(pooled.weights, make)
    patcher = root.clone()
    sample_by(patcher, source.model.model_sampling)
    patcher.decision, patcher.origin = decision, object()
    patcher.memory_text = memory_for(source, decision, devices, shares).text
    if decision.model is not None and (decision.plan.ranks > 1 or (decision.table and len(devices) > 1)):
        choose = partial(asked.plan_of_run, decision.model, held=decision.plan, beside=beside)
        patcher.choose_again = lru_cache(REMEMBERED)(choose)
    patcher.side_branch, patcher.compiled, patcher.exchange = asked.side_branch, asked.compiled, asked.exchange
    patcher.step_cache, patcher.worker_loop = asked.step_cache, asked.worker_loop
    patcher.attention, patcher.tries, patcher.shares = asked.attention, asked.tries, shares
    if asked.advises:
        # neither may hold the source: it has the model, which ComfyUI expects to go with its last MODEL
        of = source.spec, source.sizes.total
        Thread(target=_counted_or_none, args=of, daemon=True).start()
        patcher.advise = partial(_advised, chooser=asked, of=of, beside=beside)
    return patcher


def _advised(
    patcher: RemotePatcher,
    settings: Mapping[str, object],
    *,
    chooser: Chooser,
    of: tuple[ModelSpec, int],
    beside: float,
) -> dict | None:
    """The plan that is predicted to be clearly quicker at such a run, as `suggestion` has it; None where none is, and
    as long as the model is not counted."""
    counted = _known_count(*of)
    if counted is None:
        return None
    weighed = replace(patcher.decision, work=usual_work_of(counted), model=counted.model)
    work = work_of_settings(patcher, settings, weighed)
    better = None if work is None else chooser.advised(counted.model, work, beside)
    gain = None if better is None else better.gain_over(patcher.plan)
    if better is None or gain is None or gain < PREDICTED_CLEARLY:
        return None
    return suggestion(plan_part(better.plan), factor=gain, by="predicted")


def decide_for(source: HostedSource, chooser: Chooser, *, beside: float, tick: Tick | None = None) -> Decision:
    """The plan that `chooser` takes for a file.

    `beside` as it has it; `tick`: as of `Counts.of`, called while the model is counted.

    Raises `ValueError` for one that fits neither the devices nor it, and what `tick` raises.
    """
    return chooser.decision_for_model(
        source.unshared,
        whole_batches=source.whole_batches,
        weight_bytes=source.sizes.total,
        beside=beside,
        count=partial(_count, source.spec, source.sizes.total, tick),
    )


def refuse_unfit(source: HostedSource, plan: ParallelPlan, asked: Chooser) -> None:
    """Raise `ValueError` for a plan, a step cache or shares that do not fit a file, and where memory lacks."""
    transformer = source.model.diffusion_model
    refuse_unplanned(transformer, plan)
    refuse_step_cache(transformer, asked.step_cache)
    refuse_stages_with_cache(plan.pipefusion, asked.step_cache)
    refuse_beyond_room(plan, asked.selection.devices, asked.shares, source.sizes.total)
    refuse_beyond_host(plan, asked.selection.devices, source.sizes.total)


def _while_counted(source: HostedSource) -> Tick:
    """Says on the node how long a model is being counted; raises what ComfyUI raises when the user cancels."""
    node, name = NodeText(), os.path.basename(source.spec.path)

    def tick(since_s: float) -> None:
        check_cancelled()
        node.counting(name, since_s)

    return tick


def _count(spec: ModelSpec, num_bytes: int, tick: Tick | None = None) -> Counted:
    counted = COUNTS.of(spec.path, spec.dtype, this_comfyui(), found=spec.found, tick=tick)
    return counted.with_weights(num_bytes)


def _known_count(spec: ModelSpec, num_bytes: int) -> Counted | None:
    counted = COUNTS.known(spec.path, spec.dtype, this_comfyui(), found=spec.found)
    return None if counted is None else counted.with_weights(num_bytes)


def _counted_or_none(spec: ModelSpec, num_bytes: int) -> None:
    with suppress(ValueError):  # what cannot be counted gets no advice
        _count(spec, num_bytes)


def memory_for(
    source: HostedSource, decision: Decision, devices: Devices, shares: tuple[int, ...] | None
) -> DeviceMemory:
    """What the plan of `decision` takes of each device, before anything is loaded; `shares` as `remote_patcher` takes
    them. How much each computes by measured shares is not known yet."""
    model, work = decision.model, decision.work
    if model is None and (counted := _known_count(source.spec, source.sizes.total)):
        model, work = counted.model, usual_work_of(counted)
    plan = decision.plan.with_shares(shares or ())
    held = held_by_memory(plan, devices, source.sizes.total) if shares is None else plan
    return needed_memory(plan, devices, source.sizes, model, work, held=held)


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
    check_latent({"samples": noise}, "latent_image")
    check_controlnets(guider.conds)
    _refuse_other_weights(patcher, vars(guider).values())
    work = work_of_run(guider, noise, sigmas, patcher.decision)
    of = Tunable.of(patcher, patcher.shares_of_run())
    decision, trier = with_tries(of, work, patcher.decision_for(work))
    decision = patcher.model.corrected.told(decision) if patcher.shares is None else decision
    run = patcher.new_run(decision)
    patcher.model.last_run = LastRun(of=of, work=work, sizes=_sizes_of_run(patcher, noise))
    run.trier = trier
    if trier is not None and trier.by_graphs:
        run.graphs_under = decision.plan
    run.guided, run.images, run.steps = asks_both(guider), noise.shape[0], max(1, len(sigmas) - 1)
    run.controlled = have_controlnet(guider.conds)
    run.packs_around |= have_packs_around({"loop": [guider, sampler, vars(sampler)]}, ["loop"])
    run.lean = run.controlled or any(
        isinstance(each, ModelPatcher) and not isinstance(each, RemotePatcher) for each in vars(guider).values()
    )
    kind = type(patcher.model.diffusion_model)
    check_skipped_layers(kind, patcher.written(), sigmas.tolist()[:-1], guided=_is_guided(guider))
    LIVE.begins(run)
    try:
        with begun(guider.model_options, run), readable_weights(patcher.model, patcher.patches, guider.conds):
            more, named = with_late_callback(run, sampler, more, named, stays=not patcher.worker_loop)
            if patcher.worker_loop:
                sampler = to_workers(sampler, run)
            samples = executor(noise, latent, sampler, sigmas, *more, **named)
            run.call_late()
    except BaseException as error:
        patcher.list_again()
        told = told_of_another_model(error, patcher, _latent_shape(noise, named))
        if told is not error:
            raise told from error
        raise
    if trier is not None:
        trier.after(run)
    if patcher.shares is None and of.shares:
        patcher.model.corrected.after(run, of.shares, whole_bytes(patcher.model.pooled.devices))
    return samples


def _latent_shape(noise: torch.Tensor, named: Mapping[str, Any]) -> Sequence[int]:
    """Of the run's latent; () where ComfyUI packs several into one, whose channels differ."""
    shapes: Sequence[Sequence[int]] = named.get("latent_shapes") or [noise.shape]
    return shapes[0] if len(shapes) == 1 else ()


def _sizes_of_run(patcher: RemotePatcher, noise: torch.Tensor) -> dict[str, int]:
    """The report's sizes of a run, with a video's frames as they are decoded; one where its model made an image."""
    sizes, model = sizes_of(patcher, {"samples": noise}), patcher.model
    if "frames" in sizes or (len(noise.shape) == 5 and type(model).__name__ not in IMAGES):
        sizes["frames"] = (noise.shape[2] - 1) * model.latent_format.temporal_downscale_ratio + 1
    return sizes


def _is_guided(guider: object) -> bool:
    """Whether a run computes its negative conditioning, as ComfyUI's guiders do unless cfg is 1."""
    return vars(guider).get("cfg") != 1.0 or "disable_cfg1_optimization" in guider.model_options


def _refuse_other_weights(patcher: RemotePatcher, others: Iterable[object]) -> None:
    """Raise `ValueError` for a MODEL of another loader on the same weights with other changes of them.

    ComfyUI has one model for both and would give it one's changes alone. Of one loader stock does the same.
    """
    for other in others:
        if isinstance(other, RemotePatcher) and other.model is patcher.model and other.origin is not patcher.origin:
            if other.delta_set().name != patcher.delta_set().name:
                name = os.path.basename(patcher.model.pooled.spec.path)
                raise ValueError(
                    f"the guider has two MODELs of {name} on the same workers with different LoRAs, and both would get "
                    "those of one; use Load Diffusion Model for one of them, or other devices in its SP Config"
                )
