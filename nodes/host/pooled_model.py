"""One file, in one pool, under one plan: what a MODEL of ours stands for.

Owns how a call gets to the pool, and the record of the requests made while someone listens. Whether the weights are
there is the pool's to say. Knows nothing of ComfyUI's model classes.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial

import torch

from ...parallel_runtime.checkpoint import ModelSpec
from ...parallel_runtime.devices import Device
from ...parallel_runtime.patch import PRISTINE, PatchSet
from ...parallel_runtime.plan import ParallelPlan
from ...parallel_runtime.pool.calls import ModelCall
from ...parallel_runtime.pool.pool import Pool
from ...parallel_runtime.pool.resident import ResidentRun, StepDone
from .lanes import Handed, hand_over
from .pools import POOLS, Devices, Weights


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request to the pool, as it was measured: seconds, since when, and the workers' own reports, by rank.

    `calls` are the calls of the model that it carried, each (batch, image tokens, text tokens).
    """

    calls: tuple[tuple[int, int, int], ...]
    began_s: float
    wall_s: float
    ranks: list[dict]


_RECORD: ContextVar[list[Request] | None] = ContextVar("parallel_dit_requests", default=None)
_LOADS: ContextVar[dict[int, float] | None] = ContextVar("parallel_dit_loads", default=None)
_CAPTURE: ContextVar[list[ModelCall] | None] = ContextVar("parallel_dit_captured", default=None)


_TRACED: ContextVar[bool] = ContextVar("parallel_dit_traced", default=False)


@contextmanager
def tracing() -> Iterator[None]:
    """Have each rank trace the requests of this block; a trace is in the rank's report, as `trace`, gzipped JSON."""
    token = _TRACED.set(True)
    try:
        yield
    finally:
        _TRACED.reset(token)


@contextmanager
def recording() -> Iterator[list[Request]]:
    """Collect the requests of this block in order, those of lanes that it starts included."""
    requests: list[Request] = []
    token = _RECORD.set(requests)
    try:
        yield requests
    finally:
        _RECORD.reset(token)


@contextmanager
def noting_loads() -> Iterator[dict[int, float]]:
    """Seconds by rank that ranks take to load weights in this block; of those that have them already, nothing."""
    seconds: dict[int, float] = {}
    token = _LOADS.set(seconds)
    try:
        yield seconds
    finally:
        _LOADS.reset(token)


@contextmanager
def capturing() -> Iterator[list[ModelCall]]:
    """Collect the calls of this block instead of sending them; each is answered with zeros."""
    calls: list[ModelCall] = []
    token = _CAPTURE.set(calls)
    try:
        yield calls
    finally:
        _CAPTURE.reset(token)


def is_capturing() -> bool:
    """Whether calls of a model are only looked at now."""
    return _CAPTURE.get() is not None


@dataclass(frozen=True, kw_only=True)
class WeightSizes:
    """Bytes of all weights as a rank keeps them, and of the biggest block."""

    total: int
    biggest_block: int


class StepListener:
    """What hears of steps as they end; this one does nothing with them."""

    def request(self, wall_s: float, ranks: Sequence[Mapping]) -> None:
        """One exchange with the workers took `wall_s`; `ranks` are their reports, by rank."""

    def plan_chosen(self, name: str, work: str) -> None:
        """A sampling run begins under the plan of this name; `work` is what it was chosen for, "" for a given plan."""

    def compiling(self) -> None:
        """The workers make graphs of the blocks; told again and again until they have."""

    def resident_began(self) -> None:
        """A loop inside the workers begins."""

    def resident_step(self, num_ranks: int) -> None:
        """A step of a loop inside the workers ends; they report at the end of the loop."""


class PooledModel:
    """A handle on weights in a pool, and the plan and patches of the run that uses them now.

    Cheap: starts and loads nothing.
    """

    def __init__(
        self,
        devices: Devices,
        spec: ModelSpec,
        plan: ParallelPlan,
        *,
        sizes: WeightSizes,
        num_heads: int,
        listener: StepListener,
    ) -> None:
        self._listener = listener
        self.devices = devices
        self.spec = spec
        self.plan = plan
        self.sizes = sizes
        self.num_heads = num_heads
        self.patches = PRISTINE
        self.compiled = False
        self.run = ""  # the sampling run under way, by a name of its own

    @property
    def pool(self) -> Pool:
        """The pool of our devices; the same object for every model on them."""
        return POOLS.pool(self.devices)

    @property
    def started(self) -> bool:
        """Whether our devices have workers now."""
        return POOLS.is_alive(self.devices)

    @property
    def measured(self) -> list[dict]:
        """What the present set of workers measured of its devices, by rank; [] when it has not."""
        return POOLS.measured(self.devices)

    @property
    def weights(self) -> Weights:
        """What the registry knows our weights by. Plans that differ in the number of ranks alone share them."""
        return self.devices, self.spec, self.plan.layout.kind

    def holds(self, plan: ParallelPlan) -> bool:
        """Whether the workers that live now hold our weights as `plan` needs them."""
        return self.started and self.pool.holds(self.spec, plan)

    def bytes_on(self, device: torch.device, plan: ParallelPlan) -> int:
        """Bytes of weights that the plan's ranks keep on `device`; every rank on the CPU counts for the CPU."""
        layout = plan.layout
        if layout.offloaded and device.type != "cpu":
            return 0  # they lie in host memory; the blocks that visit are `visiting_bytes`
        return -(-self.sizes.total // (layout.shards * layout.stages)) * self.ranks_on(device, plan)

    def ranks_on(self, device: torch.device, plan: ParallelPlan) -> int:
        """How many of the plan's ranks compute on `device`."""
        return sum(_is_on(rank, device) for rank in self.devices[: plan.ranks])

    def visiting_bytes(self, plan: ParallelPlan) -> int:
        """Bytes of the blocks that a rank has whole only while it computes them: the present one and the next."""
        layout = plan.layout
        return 2 * self.sizes.biggest_block if layout.shards > 1 or layout.offloaded else 0

    def load(
        self, plan: ParallelPlan, *, progress: Callable[[int, int], None], check_cancelled: Callable[[], None]
    ) -> None:
        """Have the weights in the workers as `plan` needs them, starting those first where there are none.

        Raises `ValueError` when the file was changed, `PoolError` when a worker fails, and whatever `check_cancelled`
        raises.
        """
        self.spec.refuse_changed()

        def load(pool: Pool) -> None:
            if len(self.devices) > 1:
                POOLS.measured(self.devices, partial(Pool.measure_devices, check_cancelled=check_cancelled))
            result = pool.load(self.spec, plan, progress=progress, check_cancelled=check_cancelled)
            loads = _LOADS.get()
            if loads is not None:
                loads.update(result.rank_load_s)

        POOLS.load(self.weights, plan, load)

    def patch(self, patches: PatchSet, plan: ParallelPlan, check_cancelled: Callable[[], None]) -> None:
        """Have the weights changed by just these patches, before the first step asks for it. Raises as `load`."""
        self.patches = patches
        self.pool.patch(self.spec, patches, plan, check_cancelled=check_cancelled)

    def begin(self, plan: ParallelPlan, work: str) -> None:
        """A sampling run begins under `plan`; `work` is what it was chosen for, in words, "" for a plan as given."""
        self.plan = plan
        self._listener.plan_chosen(plan.name, work)

    def unload(self, plan: ParallelPlan) -> None:
        """Free the weights in the workers; nothing when they are not there."""
        POOLS.unload(self.weights, plan)

    def step(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        out_channels: int,
        options: Mapping[str, object],
        check_cancelled: Callable[[], None],
        place: str | None = None,
    ) -> torch.Tensor:
        """One call of the transformer; `tensors` as `conditioning.step_tensors` makes them. In a lane, others go first.

        Returns (B, S_img, out_channels) on the CPU, in the dtype of `tensors["img"]`. Raises `PoolError` when a
        worker fails, `ValueError` for shapes the model cannot take, and whatever `check_cancelled` raises.
        """
        img = tensors["img"]
        batch, image_tokens, _ = img.shape
        plan, patches = self.plan, self.patches
        if plan.pipefusion > 1 and place is not None:
            options = {**options, "pipeline": {"run": self.run, "key": place}}

        def send(calls: list[ModelCall]) -> list[torch.Tensor]:
            result = self.pool.run(
                self.spec, plan, calls, patches=patches, check_cancelled=self._checks(check_cancelled)
            )
            self._listener.request(result.wall_s, result.ranks)
            requests = _RECORD.get()
            if requests is not None:
                shapes = tuple((*call.out_shape[:2], call.tensors["txt"].shape[1]) for call in calls)
                began_s = time.perf_counter() - result.wall_s
                requests.append(Request(calls=shapes, began_s=began_s, wall_s=result.wall_s, ranks=result.ranks))
            return result.outs

        call = ModelCall(
            tensors=tensors,
            out_shape=(batch, image_tokens, out_channels),
            out_dtype=img.dtype,
            options={
                **options,
                "timed": _RECORD.get() is not None,
                "trace": _TRACED.get(),
                "compiled": self.compiled,
            },
        )
        captured = _CAPTURE.get()
        if captured is not None:
            captured.append(call)
            return img.new_zeros(call.out_shape)
        key = (self.devices, self.spec, plan, patches.name, patches.side_branch)
        (out,) = hand_over([Handed(key, send, call)])
        return out

    def sample(self, run: ResidentRun, *, on_step: StepDone, check_cancelled: Callable[[], None]) -> torch.Tensor:
        """A whole sampling run in the workers; its latent (B, S, C) fp32 on the CPU. Raises as `step`."""

        def told(step: int, denoised: torch.Tensor) -> None:
            self._listener.resident_step(self.plan.ranks)
            on_step(step, denoised)

        began_s = time.perf_counter()
        self._listener.resident_began()
        result = self.pool.sample(
            self.spec,
            self.plan,
            run,
            patches=self.patches,
            on_step=told,
            check_cancelled=self._checks(check_cancelled),
        )
        requests = _RECORD.get()
        if requests is not None:
            shapes = tuple((*call.out_shape[:2], call.tensors["txt"].shape[1]) for call in run.conds)
            shapes *= run.program.num_calls
            requests.append(Request(calls=shapes, began_s=began_s, wall_s=result.wall_s, ranks=result.ranks))
        return result.out

    def _checks(self, check_cancelled: Callable[[], None]) -> Callable[[], None]:
        """What the pool calls while it waits: whether to go on and, where blocks are compiled, whether they are now."""
        if not self.compiled:
            return check_cancelled

        def check() -> None:
            check_cancelled()
            if self.pool.state == "compiling":
                self._listener.compiling()

        return check


def _is_on(rank: Device, device: torch.device) -> bool:
    if rank.kind != device.type:
        return False
    return rank.kind == "cpu" or rank.index == (device.index or 0)
