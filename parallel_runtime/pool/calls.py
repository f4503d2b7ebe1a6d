"""What comes back of calls of a model, whole sampling runs as a caller gives them, and the form of both on the wire."""

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..model_call import OUT, ModelCall
from ..parallel.batch_groups import cut_rows
from ..parallel.shard import split_lengths
from ..plan import BatchSlice, ParallelPlan
from ..sampler_recurrence import NUM_SIDES, PREVIEW_SLOTS, SamplerRecurrence
from ..stock_caches import LOOKED_AT, StockCache
from ..wire.protocol import MAX_TENSORS, MAX_TEXT_BYTES
from ..wire.records import to_body
from ..wire.replies import Progress, RankRun, RankStep, SampleReply, StepReply
from ..wire.requests import GroupWork, Sample

TRACE_BYTES = 8 << 20  # gzipped; 57 blocks take about 0.1 MB


@dataclass(frozen=True)
class RunResult:
    """The calls' results in memory of their own, the ranks' replies in rank order, and the time that it took.

    The time is from copying the inputs to having the results, without loading, patching or starting before, and without
    what the caller did meanwhile for longer than the ranks computed.
    `traces` are the ranks' traces, gzipped JSON, by rank; {} where none was asked for.
    """

    outs: list[torch.Tensor]
    ranks: list[StepReply]
    wall_s: float
    traces: dict[int, bytes]

    @property
    def ran(self) -> list[RankStep]:
        """What each rank of the plan ran."""
        return [reply.ran for reply in self.ranks if reply.ran is not None]

    @property
    def compile_s(self) -> float:
        """Seconds that the slowest rank took for graphs of its blocks."""
        return max((rank.compiled.compile_s for rank in self.ran if rank.compiled is not None), default=0.0)


def split_rows(calls: Sequence[ModelCall], plan: ParallelPlan) -> tuple[tuple[BatchSlice, ...], ...]:
    """The pieces of each of the plan's batch groups. Raises `ValueError` for no calls, and for a call without rows."""
    if not calls:
        raise ValueError("no calls to run; give at least one")
    if plan.batch_groups == 1 and all(call.rows for call in calls):  # nothing to share out
        return (tuple(BatchSlice(number, 0, call.rows) for number, call in enumerate(calls)),)
    return cut_rows([call.rows for call in calls], plan.batch_groups, plan.group_shares(plan.batch_groups))


def shape_of(calls: Sequence[ModelCall]) -> Hashable:
    """The shapes of all that goes into these calls, by name."""
    return tuple(tuple((name, tuple(tensor.shape)) for name, tensor in call.tensors.items()) for call in calls)


def inputs_of(calls: Sequence[ModelCall]) -> dict[str, torch.Tensor]:
    """All tensors of one request: input `t0` of call 1 is `1.t0`."""
    return {f"{number}.{name}": tensor for number, call in enumerate(calls) for name, tensor in call.tensors.items()}


def results_of(calls: Sequence[ModelCall]) -> dict[str, torch.Tensor]:
    """The results to come, named `0.out` and so on, on the meta device."""
    return {
        f"{number}.{OUT}": torch.empty(call.out_shape, dtype=call.out_dtype, device="meta")
        for number, call in enumerate(calls)
    }


def traces_of(calls: Sequence[ModelCall], *, num_ranks: int) -> dict[str, torch.Tensor]:
    """Each rank's trace to come, on the meta device, where a call has the option `trace`; {} where none has."""
    if not any(call.options.get("trace") for call in calls):
        return {}
    room = torch.empty(TRACE_BYTES, dtype=torch.uint8, device="meta")
    return {f"trace.{rank}": room for rank in range(num_ranks)}


def whole_trace(room: torch.Tensor, num_bytes: int) -> bytes:
    """A rank's trace, gzipped JSON. Raises `ValueError` for one that had no room."""
    if num_bytes > TRACE_BYTES:
        raise ValueError(f"a trace of {num_bytes} bytes, at most {TRACE_BYTES}; trace fewer calls, or a smaller batch")
    return bytes(room[:num_bytes].numpy())


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
class WorkerLoopRun:
    """A whole sampling run. `conds`: the positive conditioning and, for cfg, the negative one, as a model's call each.

    A call of ComfyUI's own model has no tokens here: it is one of its `apply_model`, for images whose latent has the
    shape in its option `latent`, and a latent travels as (B, 1, numbers).
    `given`: the recurrence's tensors, (B, S, C) fp32. `timeline` has the ranks of a pipeline note when which patch came
    and went; their reports have it. `cache` is ComfyUI's
    EasyCache or LazyCache; `looked_at`, a bool of shape (1, S, C), says which numbers of a latent it compares.
    Raises `ValueError` for what does not belong together. `refuse_long` is asked before.
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
        if set(self.given) != set(self.recurrence.given):
            raise ValueError(
                f"tensors given for {sorted(self.given)}, the recurrence needs {list(self.recurrence.given)}"
            )
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

    def results(self) -> dict[str, torch.Tensor]:
        """What ranks write, on the meta device: two previews, used in turn, and the result."""
        latent = torch.empty(self.shape, dtype=torch.float32, device="meta")
        return {f"preview.{slot}": latent for slot in range(PREVIEW_SLOTS)} | {OUT: latent}

    def request(self, plan: ParallelPlan, *, model: int) -> Sample:
        """What a rank must know beside the tensors."""
        return Sample(
            model=model,
            plan=plan,
            recurrence=self.recurrence,
            cfg=self.cfg,
            batch_groups=work_of_groups(plan, images=self.shape[0], num_conds=len(self.conds)),
            calls=tuple(dict(cond.options) for cond in self.conds),
            timeline=self.timeline,
            cache=self.cache,
        )


def seen_shape(cond: ModelCall) -> tuple[int, ...]:
    """(B, 1, N) of the latent that a call of the model sees, as a row of numbers for each image."""
    return cond.out_shape[0], 1, cond.out_shape[1]


def refuse_unfit_loop(plan: ParallelPlan, conds: Sequence[ModelCall], cache: StockCache | None) -> None:
    """Raise `ValueError` for a cache of ComfyUI's in a pipeline, which would be empty between steps, and where groups
    of ranks without a conditioning would have to find out with the others what is skipped, or which patch is whose."""
    if cache is not None and plan.pipefusion > 1:
        raise ValueError("a step cache decides between the steps of a pipeline")
    if plan.cfg <= NUM_SIDES or len(conds) != NUM_SIDES:
        return
    if cache is not None or any(cond.options.get("step_cache") for cond in conds):
        raise ValueError(
            f"cfg={plan.cfg} leaves ranks without a prompt, and a step cache decides on all of them; use cfg=2"
        )
    if plan.pipefusion > 1:
        raise ValueError(
            f"cfg={plan.cfg} leaves ranks without a prompt, and a pipeline goes on with all of them; use cfg=2"
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
class WorkerLoopResult:
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


def work_of_groups(plan: ParallelPlan, *, images: int, num_conds: int) -> tuple[GroupWork, ...]:
    """For each batch group, the images and the conditionings it does, and whether it exchanges with the rest of its cfg
    axis.

    With two conditionings and a cfg axis each side goes to one batch group; else images are shared out over all batch
    groups.
    """
    shares_cfg = num_conds == NUM_SIDES and plan.cfg > 1
    groups = plan.data if shares_cfg else plan.batch_groups
    lengths = split_lengths(images, groups, plan.group_shares(groups))
    found = []
    for batch_group in range(plan.batch_groups):
        group = batch_group // plan.cfg if shares_cfg else batch_group
        start = sum(lengths[:group])
        conds = tuple(range(num_conds))
        if shares_cfg:
            conds = tuple(side for side in conds if side == batch_group % plan.cfg)
        stop = start + lengths[group]
        works = stop > start
        found.append(GroupWork(start=start, stop=stop, conds=conds if works else (), shares_cfg=shares_cfg and works))
    return tuple(found)


def writers(plan: ParallelPlan, run: WorkerLoopRun) -> list[int]:
    """The ranks whose rows make up a step's preview: those of the last stage of the batch groups that have work."""
    batch_groups = work_of_groups(plan, images=run.shape[0], num_conds=len(run.conds))
    ranks_a_group = plan.ranks // plan.batch_groups
    return [
        rank
        for batch_group, work in enumerate(batch_groups)
        if work.conds
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
