"""A sampling run as a caller gives it, and its form on the wire.

Letters: `B` images, `S` tokens of the latent, `C` channels of a token.

Owns the names of a run's tensors, how its images and conditionings are shared out over batch groups, and what the
parent does after each step. Does not own how a rank runs it (worker/in_worker_sampling.py).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..parallel.shard import split_lengths
from ..plan import ParallelPlan
from ..sampler_recurrence import NUM_SIDES, PREVIEW_SLOTS, SamplerRecurrence
from ..stock_caches import LOOKED_AT, StockCache
from ..wire.protocol import MAX_TENSORS, MAX_TEXT_BYTES
from ..wire.records import to_body
from ..wire.replies import Progress, RankRun, SampleReply
from ..wire.requests import GroupWork, Sample
from .arena import Extent
from .calls import ModelCall, inputs_of

CREDIT_AHEAD = 2  # steps that ranks may be ahead of what the parent has taken in
MAX_RECURRENCE_BYTES = MAX_TEXT_BYTES - 16 * 1024  # the rest of a message is for options and batch groups
MAX_GIVEN = MAX_TENSORS - 64  # the others are for inputs and results

StepDone = Callable[[int, torch.Tensor], None]


@dataclass(frozen=True, kw_only=True)
class Inpaint:
    """What a noise mask keeps: mask (1: sampled), noise and latent, each (B, S, C) fp32."""

    mask: torch.Tensor
    noise: torch.Tensor
    latent: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class InWorkerRun:
    """A whole sampling run. `conds`: the positive conditioning and, for cfg, the negative one, as a model's call each.

    A call of ComfyUI's own model has no tokens here: it is one of its `apply_model`, for images whose latent has the
    shape in its option `latent`, and a latent travels as (B, 1, numbers).
    `given`: the recurrence's tensors, (B, S, C) fp32. `timeline` has the ranks of a pipeline note when which patch came
    and went; their reports have it. `cache` is ComfyUI's
    EasyCache or LazyCache; `looked_at`, a bool of shape (1, S, C), says which numbers of a latent it compares.
    Raises `ValueError` for what does not belong together, and for a recurrence that is too long to send.
    """

    recurrence: SamplerRecurrence
    conds: tuple[ModelCall, ...]
    cfg: float
    given: Mapping[int, torch.Tensor]
    inpaint: Inpaint | None = None
    timeline: bool = False
    cache: StockCache | None = None
    looked_at: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if not 1 <= len(self.conds) <= NUM_SIDES:
            raise ValueError(f"{len(self.conds)} conditionings for a run; give one, or two for cfg")
        shapes = {seen_shape(cond) for cond in self.conds}
        if len(shapes) > 1:
            raise ValueError(f"the conditionings see images of different shapes {sorted(shapes)}; use the host loop")
        if set(self.given) != set(self.recurrence.given):
            raise ValueError(
                f"tensors given for {sorted(self.given)}, the recurrence needs {list(self.recurrence.given)}"
            )
        refuse_long(self.recurrence)
        self._refuse_shapes()
        self._refuse_cache()

    def _refuse_shapes(self) -> None:
        if len(self.shape) != 3 or 0 in self.shape:
            raise ValueError(f"a latent of shape {self.shape}; give (images, tokens, channels), at least one of each")
        latents = {f"given.{number}": tensor for number, tensor in self.given.items()} | self._inpaint_tensors()
        for name, tensor in latents.items():
            if tuple(tensor.shape) != self.shape or tensor.dtype != torch.float32:
                raise ValueError(
                    f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}; give float32 of shape {self.shape}"
                )
        images, tokens, channels = self.shape
        img = seen_shape(self.conds[0])
        if img[0] != images or img[1] < tokens or img[2] < channels:
            raise ValueError(f"the conditionings see images of shape {img}, the latent is {self.shape}; make them fit")

    def _refuse_cache(self) -> None:
        if (self.cache is None) != (self.looked_at is None):
            raise ValueError("a step cache of ComfyUI's and what it looks at belong together; give both, or none")
        if self.cache is None or self.looked_at is None:
            return
        wanted = (1, *self.shape[1:])
        if tuple(self.looked_at.shape) != wanted or self.looked_at.dtype != torch.bool:
            raise ValueError(
                f"looked_at is {self.looked_at.dtype} of shape {tuple(self.looked_at.shape)}; "
                f"give bool of shape {wanted}"
            )
        if len(self.cache.calls) != self.recurrence.num_calls:
            raise ValueError(
                f"a step cache for {len(self.cache.calls)} calls, the run makes {self.recurrence.num_calls}; "
                "make them fit"
            )

    def _inpaint_tensors(self) -> dict[str, torch.Tensor]:
        if self.inpaint is None:
            return {}
        return {f"inpaint.{name}": getattr(self.inpaint, name) for name in ("mask", "noise", "latent")}

    @property
    def shape(self) -> tuple[int, ...]:
        """(B, S, C) of the latent."""
        return tuple(self.given[0].shape)

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that travels, by name."""
        found = inputs_of(self.conds)
        found |= {f"given.{number}": tensor for number, tensor in self.given.items()}
        found |= {} if self.looked_at is None else {LOOKED_AT: self.looked_at}
        return found | self._inpaint_tensors()

    def results(self) -> list[Extent]:
        """Where ranks write: the result last, before it two previews, used in turn."""
        previews = [Extent(f"preview.{slot}", "float32", self.shape) for slot in range(PREVIEW_SLOTS)]
        return [*previews, Extent("out", "float32", self.shape)]

    def request(self, plan: ParallelPlan, *, model: int, mesh: int) -> Sample:
        """What a rank must know beside the tensors."""
        return Sample(
            model=model,
            mesh=mesh,
            recurrence=self.recurrence,
            cfg=self.cfg,
            batch_groups=shares(plan, images=self.shape[0], num_conds=len(self.conds)),
            calls=tuple(dict(cond.options) for cond in self.conds),
            timeline=self.timeline,
            cache=self.cache,
        )


def seen_shape(cond: ModelCall) -> tuple[int, ...]:
    """(B, S, C) of the images that a call of the model sees; ComfyUI's own model sees one row of numbers."""
    img = cond.tensors.get("img")
    return (cond.out_shape[0], 1, cond.out_shape[1]) if img is None else tuple(img.shape)


def refuse_unfit(plan: ParallelPlan, run: InWorkerRun) -> None:
    """Raise `ValueError` when the plan's pipeline does not fit the run."""
    steps, tokens = len(run.recurrence.step_ends), seen_shape(run.conds[0])[1]
    if plan.pipefusion > 1 and plan.warmup_steps > steps:
        raise ValueError(
            f"warmup_steps={plan.warmup_steps} is more than the run's {steps} step(s); "
            f"use at most {steps}, which keeps every step exact"
        )
    if plan.num_patches > tokens and "img" in run.conds[0].tensors:  # of ComfyUI's own model the ranks count them
        raise ValueError(
            f"patches={plan.num_patches} is more than the image's {tokens} tokens; use fewer, or a bigger image"
        )


def refuse_long(recurrence: SamplerRecurrence) -> None:
    """Raise `ValueError` when a recurrence has more numbers, or tensors given ahead, than a message has room for."""
    num_bytes = len(json.dumps(to_body(recurrence), separators=(",", ":")))
    if num_bytes > MAX_RECURRENCE_BYTES:
        raise ValueError(
            f"a run of {recurrence.num_calls} calls takes {num_bytes} bytes to describe, at most "
            f"{MAX_RECURRENCE_BYTES}; use fewer steps, or the host loop"
        )
    if len(recurrence.given) > MAX_GIVEN:
        raise ValueError(
            f"a run with noise for {len(recurrence.given)} calls, at most {MAX_GIVEN}; use fewer steps, or the "
            "host loop"
        )


@dataclass(frozen=True)
class InWorkerResult:
    """The sampled latent (B, S, C) fp32, the ranks' reports in rank order, and the time that it all took."""

    out: torch.Tensor
    ranks: list[SampleReply]
    wall_s: float

    @property
    def ran(self) -> list[RankRun]:
        """What each rank of the plan ran."""
        return [reply.ran for reply in self.ranks if reply.ran is not None]

    @property
    def drained(self) -> str | None:
        """Why a pipeline was empty between steps; None where it was not, or there is none."""
        return next((ran.drained for ran in self.ran if ran.drained), None)

    @property
    def skipped_calls(self) -> int:
        """Calls of the model that a cache of ComfyUI's stood for."""
        return max((ran.skipped_calls or 0 for ran in self.ran), default=0)


def shares(plan: ParallelPlan, *, images: int, num_conds: int) -> tuple[GroupWork, ...]:
    """For each batch group, the images and the conditionings it does, and whether it exchanges with the rest of its cfg
    axis.

    With two conditionings and a cfg axis each side goes to one batch group; else images are shared out over all batch
    groups.
    """
    exchange = num_conds == NUM_SIDES and plan.cfg > 1
    lengths = split_lengths(images, plan.data if exchange else plan.batch_groups)
    found = []
    for batch_group in range(plan.batch_groups):
        group = batch_group // plan.cfg if exchange else batch_group
        start = sum(lengths[:group])
        conds = tuple(range(num_conds))
        if exchange:
            conds = tuple(side for side in conds if side == batch_group % plan.cfg)
        stop = start + lengths[group]
        works = stop > start
        found.append(GroupWork(start=start, stop=stop, conds=conds if works else (), exchange=exchange and works))
    return tuple(found)


def writers(plan: ParallelPlan, run: InWorkerRun) -> list[int]:
    """The ranks whose rows make up a step's preview: those of the last stage of the batch groups that have work."""
    batch_groups = shares(plan, images=run.shape[0], num_conds=len(run.conds))
    ranks_a_group = plan.ranks // plan.batch_groups
    return [
        rank
        for batch_group, share in enumerate(batch_groups)
        if share.conds
        for rank in range((batch_group + 1) * ranks_a_group - plan.parts, (batch_group + 1) * ranks_a_group)
    ]


class Steps:
    """What the parent does as steps are done: hands previews on in order, and raises the ranks' credit."""

    def __init__(
        self,
        *,
        writers: Sequence[int],
        preview: Callable[[int], torch.Tensor],
        grant: Callable[[int], None],
        on_step: StepDone,
    ) -> None:
        self._writers, self._preview, self._grant, self._on_step = writers, preview, grant, on_step
        self._done = 0
        grant(CREDIT_AHEAD)

    def take(self, progress: Mapping[int, Progress]) -> None:
        """Take in how far the ranks are; a step is done when every rank that writes has said so."""
        if any(rank not in progress for rank in self._writers):
            return
        done = min(progress[rank].done for rank in self._writers)
        while self._done < done:
            self._on_step(self._done, self._preview(self._done % PREVIEW_SLOTS))
            self._done += 1
            self._grant(self._done + CREDIT_AHEAD)
