"""Many sampling runs with one MODEL, as many of them at once as its plan has replicas.

Each is a whole stock run in a task. Owns what the runs must not share (ControlNets, random numbers, the patcher that
samples), what they do share (one progress bar), and when they have to come one after the other.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from ..contract.allocations import forget_records
from ..contract.comfyui import BaseModel, ControlBase, ModelPatcher, comfy, latent_preview
from ..contract.order import why_runs_keep_order
from ..contract.version import refuse_off
from ..model.patcher import RemotePatcher
from ..model.pooled_model import PooledModel
from ..sampling.late_previews import OnStep
from ..sampling.run_context import MeasuredRequest, Recorder
from ..sampling.stock import SamplingRecord, check_latent, decision_of, pooled_of, timed_run
from ..sampling.workload_from_guider import work_of_settings
from .cooperative_tasks import Kept, RandomNumbers, run_in_turns

log = logging.getLogger(__name__)
CONDITIONINGS = ("positive", "negative")


@dataclass(kw_only=True)
class ListRecord:
    """What was measured of a list: seconds from the first run's begin to the last one's end, and of each run its own.

    All runs have one recorder, as calls of several may travel together.
    """

    pooled: PooledModel | None
    at_once: int
    runs: list[SamplingRecord]
    denoise_s: float = 0.0
    recorder: Recorder = field(default_factory=Recorder)

    @property
    def requests(self) -> list[MeasuredRequest]:
        """What the runs asked of the workers, in order."""
        return self.recorder.requests


class OfTheRun:
    """What ComfyUI notes of a run on the model that all clones share, as `cooperative_tasks.Kept`.

    That is which patcher samples and, where a latent has several parts (MiniMax H3), their shapes.
    """

    NAMES = ("current_patcher", "latent_shapes")

    def __init__(self, model: BaseModel) -> None:
        self._model = model

    def get(self) -> dict[str, object]:
        """What is noted now; an older ComfyUI has no shapes."""
        return {name: vars(self._model)[name] for name in self.NAMES if name in vars(self._model)}

    def put(self, version: Mapping[str, object]) -> None:
        """Have that noted."""
        for name, value in version.items():
            setattr(self._model, name, value)


class SharedProgress:
    """One progress bar over all runs, with the previews of each."""

    def __init__(self, model: ModelPatcher, steps: Sequence[int]) -> None:
        self._steps = steps
        self._done = [0] * len(steps)
        self._bar = comfy.utils.ProgressBar(sum(steps))
        self._previewer = latent_preview.get_previewer(model.load_device, model.model.latent_format)

    def of(self, number: int) -> OnStep:
        """What the run of this number calls after each step."""

        def on_step(step: int, denoised: torch.Tensor, x: torch.Tensor, total_steps: int) -> None:
            preview = None
            if self._previewer is not None:
                seen = denoised.tensors[0] if denoised.is_nested else denoised
                preview = self._previewer.decode_latent_to_preview_image("JPEG", seen)
            self._done[number] = self._steps[number] * min(step + 1, total_steps) // total_steps
            self._bar.update_absolute(sum(self._done), preview=preview)

        return on_step


def sample_list(model: ModelPatcher, runs: Sequence[Mapping[str, object]]) -> tuple[list[dict], ListRecord]:
    """What KSampler does with the settings of each run. Returns the latents in order and what was measured.

    Raises `ValueError` for a latent without images, before anything is sampled.
    """
    refuse_off("list")
    for number, run in enumerate(runs, start=1):
        check_latent(run["latent"], f"latent_image {number} of {len(runs)}")
    model = _under_plan_of_list(model, runs)
    at_once = _at_once(model, runs)
    progress = SharedProgress(model, [run["steps"] for run in runs])
    recorder = Recorder()
    records = [SamplingRecord(decision=decision_of(model), recorder=recorder) for _ in runs]
    record = ListRecord(pooled=pooled_of(model), at_once=at_once, runs=records, recorder=recorder)
    kept: list[Kept] = [RandomNumbers()]
    beside: list[ModelPatcher] = []
    if at_once > 1:
        kept.append(OfTheRun(model.model))
        beside = _conditioned_models(model, runs)
        runs = [_with_own_controlnets(run) for run in runs]
    tasks = [
        partial(timed_run, model, run, each, progress.of(number), beside)
        for number, (run, each) in enumerate(zip(runs, record.runs, strict=True))
    ]
    began_s = time.perf_counter()
    latents = run_in_turns(tasks, at_once=at_once, kept=kept, at_end=forget_records)
    record.denoise_s = time.perf_counter() - began_s
    return latents, record


def _under_plan_of_list(model: ModelPatcher, runs: Sequence[Mapping[str, object]]) -> ModelPatcher:
    """The MODEL under one plan for all runs, where auto takes one with replicas for so many images of one kind.

    Otherwise as it is, and each run has a plan of its own.
    """
    if not isinstance(model, RemotePatcher) or model.decision.work is None or len(runs) == 1:
        return model
    if why_runs_keep_order(model, _conds(runs)) is not None:
        return model
    found = [work_of_settings(model, run, model.decision) for run in runs]
    works = [work for work in found if work is not None]
    longest = max((work.text_tokens for work in works), default=0)
    one, *others = {replace(work, text_tokens=longest) for work in works} or {None}  # prompts differ by a few tokens
    if others or one is None or len(works) < len(found):
        return model
    decision = model.decision_for(replace(one, batch=len(runs) * one.batch, graphs=False))  # which `under` never has
    return model.under(decision) if decision.plan.data > 1 else model


def _conds(runs: Sequence[Mapping[str, object]]) -> list:
    return [run[name] for run in runs for name in CONDITIONINGS]


def _at_once(model: ModelPatcher, runs: Sequence[Mapping[str, object]]) -> int:
    """How many runs may be in flight: one a replica, and one alone where their order matters."""
    at_once = min(model.plan.data, len(runs)) if isinstance(model, RemotePatcher) else 1
    if at_once == 1:
        return 1
    reason = why_runs_keep_order(model, _conds(runs))
    if reason is None:
        return at_once
    log.warning("the list is sampled one after the other, and replicas idle: %s", reason)
    return 1


def _conditioned_models(model: ModelPatcher, runs: Sequence[Mapping[str, object]]) -> list[ModelPatcher]:
    """The ControlNets of all runs: loaded with each, so that none evicts another's while that one samples."""
    values = [values for run in runs for name in CONDITIONINGS for _, values in run[name]]
    models, _ = comfy.sampler_helpers.get_additional_models({"all": values}, model.model_dtype())
    return list(dict.fromkeys(models))


def _with_own_controlnets(run: Mapping[str, object]) -> dict[str, object]:
    """The settings of a run, with copies of its ControlNets: they keep state from a run's begin to its end.

    A ControlNet on both sides stays one object, or ComfyUI would not batch the two.
    """
    copies: dict[int, ControlBase] = {}
    return dict(run) | {name: [[text, _own(values, copies)] for text, values in run[name]] for name in CONDITIONINGS}


def _own(values: dict, copies: dict[int, ControlBase]) -> dict:
    control = values.get("control")
    return values if control is None else values | {"control": _copied(control, copies)}


def _copied(control: ControlBase, copies: dict[int, ControlBase]) -> ControlBase:
    if id(control) not in copies:
        copies[id(control)] = copied = control.copy()
        if control.previous_controlnet is not None:
            copied.set_previous_controlnet(_copied(control.previous_controlnet, copies))
    return copies[id(control)]
