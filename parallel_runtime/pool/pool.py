"""The pool: one set of workers for a set of devices, asked one thing at a time.

Owns what callers see: starting, loading, stepping, closing; who may ask when; and when there is a new generation of
workers. Does not own what a generation holds and is asked (worker_group.py), nor how its ranks are watched and ended
(supervisor.py).

States: `stopped` -> `starting` -> `idle` <-> `loading`, `compiling`, `busy`. Any failure leads to `failed`, from which
the next call starts a fresh generation, until three have failed within a minute. Nothing that failed is ever asked
again by the pool itself.
"""

import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType, TracebackType
from typing import Any

import torch

from ..checkpoint import ModelSpec
from ..devices import STOCK_NODES, Device, missing_system
from ..errors import PoolError, SilentWorkersError
from ..patch import PRISTINE, PatchSet
from ..plan import MAX_RANKS, Layout, ParallelPlan
from ..wire.protocol import Op
from .calls import ModelCall, RunResult, StepResult, shape_of, shared_out
from .deadlines import LOAD_S, PEER_CHECK_S, REQUEST_S, START_S, Pace, checked
from .failures import Failures
from .held_weights import Check, Progress
from .models import LoadResult, Model
from .process import RankSettings, available_cpus
from .request_lock import RequestLock
from .resident import ResidentResult, ResidentRun, StepDone, refuse_unfit
from .status import State, describe, first_line
from .supervisor import Generation
from .worker_group import WorkerGroup

ENGINE = "parallel_runtime.rank.engine:Engine"
SEGMENT_BYTES = 64 << 20  # of address space; memory is used where tensors have lain
FEWER_DEVICES = "run the doctor, and name fewer devices in SP Config"

_log = logging.getLogger(__name__)


class Pool:
    """Workers on `devices`, one a rank, in rank order. Usable from any thread; one request at a time, others wait.

    `threads_per_rank`: CPU threads of each rank, by default the CPUs this process may use, shared out over the ranks.
    `deadline_s`: how long a request may show no sign of life, at least (deadlines.py); `start_deadline_s` and
    `load_deadline_s`: the same for starting, and for loading a model.
    `engine`: "module:Class" of what answers the requests, found in the pack or in the folders of `python_path`.
    `segment_bytes`: address space for the tensors of one request; bigger requests get further segments.
    `memory_budget_bytes`: weights that a rank may hold; the models used longest ago are evicted for one that is loaded.
    By default as much as its device has free.
    `check_peers`: exchange a known pattern after each start, and start again without peer access between GPUs when it
    arrives damaged, or not at all within 20 s. By default where each rank has a CUDA device of its own.

    `check_cancelled`, wherever it is taken, is called about every 50 ms in the caller's thread and cancels by raising.
    """

    def __init__(
        self,
        devices: tuple[Device, ...],
        *,
        threads_per_rank: int | None = None,
        deadline_s: float = REQUEST_S,
        start_deadline_s: float = START_S,
        load_deadline_s: float = LOAD_S,
        engine: str = ENGINE,
        python_path: tuple[str, ...] = (),
        segment_bytes: int = SEGMENT_BYTES,
        memory_budget_bytes: int | None = None,
        check_peers: bool | None = None,
    ) -> None:
        if not 1 <= len(devices) <= MAX_RANKS:
            raise ValueError(f"{len(devices)} devices for a pool; name 1 to {MAX_RANKS}")
        threads = max(1, available_cpus() // len(devices)) if threads_per_rank is None else threads_per_rank
        if threads < 1:
            raise ValueError(f"threads_per_rank={threads} is below 1; use at least one thread")
        self.devices = devices
        self.threads_per_rank = threads
        self.deadline_s = checked(deadline_s)
        self.load_deadline_s = checked(max(load_deadline_s, deadline_s))
        self.generation = 0
        self._start_deadline_s = checked(start_deadline_s)
        self._pace = Pace()
        self._segment_bytes = segment_bytes
        self._memory_budget_bytes = memory_budget_bytes
        self._settings = RankSettings(devices=devices, threads=threads, engine=engine, python_path=python_path)
        self._check_peers = self._settings.backend == "nccl" if check_peers is None else check_peers
        self._lock = RequestLock()
        self._numbers = itertools.count(1)
        self._workers: WorkerGroup | None = None
        self._failures = Failures()

    def __enter__(self) -> "Pool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def state(self) -> State:
        """What the workers are doing. Never waits."""
        workers = self._workers
        if workers is None:
            return "stopped" if self._failures.last is None else "failed"
        if not workers.generation.ready:
            return "starting"
        if (request := workers.generation.in_flight) is not None and request.op is Op.LOAD:
            return "loading"
        if request is not None and request.compiling:
            return "compiling"
        return "busy" if request is not None or self._lock.taken else "idle"

    def start(self, *, check_cancelled: Check | None = None) -> None:
        """Start the workers and wait until they are ready; nothing when they are. Raises PoolError."""
        with self._lock.acquire(check_cancelled) as check:
            self._ready_workers(check)

    def load(
        self,
        spec: ModelSpec,
        plan: ParallelPlan | None = None,
        *,
        progress: Progress | None = None,
        check_cancelled: Check | None = None,
    ) -> LoadResult:
        """Have `spec` in the workers as `plan` needs it, without a plan replicated on every rank.

        Starts the workers if need be; when the model is there already, this is the result that it had.
        `progress(loaded_bytes, total_bytes)` counts over the ranks that load. Raises PoolError when a rank fails.
        """
        self._refuse_plan(plan)
        with self._lock.acquire(check_cancelled) as check:
            return self._load(self._ready_workers(check), spec, plan, check, progress=progress).result

    def unload(self, spec: ModelSpec, plan: ParallelPlan | None = None) -> None:
        """Free `spec` in the workers, with a plan only as that plan needs it; nothing when it is not there.

        Raises PoolError when a rank fails.
        """
        with self._lock.acquire(None) as check:
            workers = self._settled_workers(check)
            if workers is not None:
                workers.unload(spec, None if plan is None else plan.layout, check)

    def give_back(self, devices: Sequence[Device]) -> None:
        """A sampling run has ended: others that compute on `devices` get the memory that is only kept there for later.

        Nothing where no rank computes on them, where there are no workers, and while those are still busy with a
        request that was given up: that is not waited for. Raises PoolError when a rank fails.
        """
        ranks = [rank for rank, device in enumerate(self.devices) if device in devices]
        if not ranks:
            return
        with self._lock.acquire(None) as check:
            workers = self._workers
            if workers is not None and workers.generation.ready and not workers.busy:
                workers.trim(ranks, check)

    def holds(self, spec: ModelSpec, plan: ParallelPlan | None = None) -> bool:
        """Whether the living workers have `spec` as `plan` needs it, without a plan replicated on every rank.

        Never waits.
        """
        workers, layout = self._workers, self._layout(plan)
        model = None if workers is None or workers.generation.ended else workers.models.find(spec, layout)
        return model is not None and model.serves(layout)

    def ensure(
        self,
        spec: ModelSpec,
        plan: ParallelPlan | None = None,
        *,
        patches: PatchSet = PRISTINE,
        progress: Progress | None = None,
        check_cancelled: Check | None = None,
    ) -> LoadResult:
        """Have `spec` loaded as by `load`, its weights pristine plus `patches`; nothing when they are already.

        Returns what `load` does. Raises PoolError when a rank fails, a patch that does not fit its weight included.
        """
        self._refuse_plan(plan)
        with self._lock.acquire(check_cancelled) as check:
            workers = self._ready_workers(check)
            model = self._load(workers, spec, plan, check, progress=progress)
            workers.patch(model, patches, check)
            return model.result

    def run(
        self,
        spec: ModelSpec,
        plan: ParallelPlan,
        calls: Sequence[ModelCall],
        *,
        patches: PatchSet = PRISTINE,
        check_cancelled: Check | None = None,
    ) -> RunResult:
        """Any number of calls of the model in one request, their rows shared out over the plan's lanes.

        Loads the model, changes its weights and makes the plan's mesh where the workers lack them. The results are on
        the CPU. A rank's report says its `lane` and the `pieces` it ran, [call, first row, row after the last]; that of
        a rank beyond the plan is {"member": False}. Raises ValueError for no calls, a call without rows, tensors or
        options that cannot travel and a plan with more ranks than devices, PoolError when a rank fails.
        """
        self._refuse_plan(plan)
        lanes = shared_out(calls, plan)
        with self._lock.acquire(check_cancelled) as check:
            workers = self._ready_workers(check)
            ensured = workers.ensure(spec, plan, patches, check)
            shape = (spec, plan, shape_of(calls))
            deadline_s = self._pace.deadline_s(shape, least_s=self.deadline_s)
            began = time.perf_counter()
            outs, ranks = workers.run(ensured, plan, calls, lanes, check, deadline_s=deadline_s)
            result = RunResult(outs, ranks, time.perf_counter() - began)
            self._pace.note(shape, result.wall_s - max(rank.get("compile_s", 0.0) for rank in ranks))
            return result

    def step(
        self,
        spec: ModelSpec,
        plan: ParallelPlan,
        tensors: Mapping[str, torch.Tensor],
        *,
        out_shape: tuple[int, ...],
        out_dtype: torch.dtype,
        options: Mapping[str, object] = MappingProxyType({}),
        patches: PatchSet = PRISTINE,
        check_cancelled: Check | None = None,
    ) -> StepResult:
        """`run` of one call."""
        call = ModelCall(tensors=tensors, out_shape=tuple(out_shape), out_dtype=out_dtype, options=options)
        result = self.run(spec, plan, [call], patches=patches, check_cancelled=check_cancelled)
        return StepResult(result.outs[0], result.ranks, result.wall_s)

    def sample(
        self,
        spec: ModelSpec,
        plan: ParallelPlan,
        run: ResidentRun,
        *,
        patches: PatchSet = PRISTINE,
        on_step: StepDone = lambda _, __: None,
        check_cancelled: Check | None = None,
    ) -> ResidentResult:
        """A whole sampling run in the workers; cancelled, it ends at most one step after the one it is in.

        `on_step(step, denoised)` is called in order with each step's denoised latent (B, S, C) fp32; raising there
        cancels too. A rank's report says its `step_s` and `prepare_s`.
        Loads, patches and raises as `run`; `ValueError` also for a run that the plan's stages do not fit.
        """
        self._refuse_plan(plan)
        refuse_unfit(plan, run)
        with self._lock.acquire(check_cancelled) as check:
            workers = self._ready_workers(check)
            ensured = workers.ensure(spec, plan, patches, check)
            began = time.perf_counter()
            out, ranks = workers.sample(ensured, plan, run, check, on_step=on_step)
            return ResidentResult(out, ranks, time.perf_counter() - began)

    def measure_devices(self, check_cancelled: Check | None = None) -> list[dict[str, Any]]:
        """Each rank's device, measured by all ranks at once, in rank order. Raises PoolError.

        `device`, `name`, `free_bytes`, `total_bytes` and `gflops`, of a matrix product, in 10^9 operations a second.
        """
        with self._lock.acquire(check_cancelled) as check:
            measured = self._ready_workers(check).measure(check)
        return [{"device": str(device)} | said for device, said in zip(self.devices, measured, strict=True)]

    def exchange_pattern(self, plan: ParallelPlan) -> list[int]:
        """Send a known pattern over the plan's mesh: how many bytes arrived wrong, by rank. Raises PoolError."""
        self._refuse_plan(plan)
        with self._lock.acquire(None) as check:
            workers = self._ready_workers(check)
            return workers.check_pattern(workers.mesh(plan, check), check)

    def probe(self, plan: ParallelPlan) -> list[dict[str, Any]]:
        """Amounts and seconds of matrices, attention, memory and exchanges over ulysses, by rank. Raises PoolError."""
        self._refuse_plan(plan)
        with self._lock.acquire(None) as check:
            workers = self._ready_workers(check)
            return workers.probe(workers.mesh(plan, check), check)

    def close(self) -> None:
        """End the workers; a request in flight in another thread comes to its end first. The pool can start again."""
        with self._lock.acquire(None):
            workers, self._workers = self._workers, None
            if workers is not None:
                workers.generation.stop()
            self._failures.forget()
        if workers is not None:
            workers.generation.watcher.join()

    def status(self) -> dict[str, Any]:
        """What a user interface shows. Never waits; holds no path, only names of files."""
        return describe(
            state=self.state,
            generation=self.generation,
            devices=self.devices,
            workers=self._workers,
            failure=self._failures.last,
            peer_access=self._settings.peer_access,
        )

    def _layout(self, plan: ParallelPlan | None) -> Layout:
        return Layout(ranks=len(self.devices)) if plan is None else plan.layout

    def _load(
        self,
        workers: WorkerGroup,
        spec: ModelSpec,
        plan: ParallelPlan | None,
        check: Check,
        *,
        progress: Progress | None = None,
    ) -> Model:
        return workers.load(spec, self._layout(plan), check, plan=plan, progress=progress)

    def _ready_workers(self, check: Check) -> WorkerGroup:
        """Workers that owe nothing and wait for a request; fresh ones where there are none."""
        workers = self._settled_workers(check) or self._fresh_workers(check)
        while self._check_peers and not workers.copies_are_sound:
            workers = self._check_copies(workers, check)
        return workers

    def _check_copies(self, workers: WorkerGroup, check: Check) -> WorkerGroup:
        """See whether ranks get what others send them. If not, other workers that copy through the host's memory."""
        hangs = None
        try:
            wrong = workers.damaged_copies(check, deadline_s=min(self.deadline_s, PEER_CHECK_S))
        except SilentWorkersError as error:
            hangs, wrong = error, f"copies between devices do not arrive ({error.cause})"
            self._failures.retract()
        if not wrong:
            return workers
        if not self._settings.peer_access:
            unsound = PoolError(f"{wrong} even without peer access", remedy=FEWER_DEVICES)
            raise workers.generation.fail(unsound) from hangs
        _log.warning("%s; starting the workers again without peer access between GPUs, which is slower", wrong)
        workers.generation.stop()
        self._workers = None
        self._settings = replace(self._settings, peer_access=False)
        return self._fresh_workers(check)

    def _fresh_workers(self, check: Check) -> WorkerGroup:
        self._failures.refuse_storm()
        _require_linux()
        check()
        self.generation += 1
        generation = Generation(
            self.generation,
            self._settings,
            segment_bytes=self._segment_bytes,
            start_deadline_s=self._start_deadline_s,
            on_death=self._bury,
            on_failure=self._note_failure,
        )
        workers = self._workers = WorkerGroup(
            generation,
            self._numbers,
            deadline_s=lambda: self.deadline_s,
            load_deadline_s=self.load_deadline_s,
            budget_bytes=self._memory_budget_bytes,
        )
        workers.settle(check)
        return workers

    def _settled_workers(self, check: Check) -> WorkerGroup | None:
        """The living workers, once they owe nothing; None when there are none, or none any more."""
        workers = self._workers
        if workers is None:
            return None
        try:
            workers.settle(check)
        except PoolError as error:  # of a request that its caller gave up: not the failure of the present one
            _log.warning("parallel workers failed before this request: %s", first_line(error))
            return None
        return workers

    def _bury(self, generation: Generation) -> None:
        """Called by the watcher when a rank has died: end the others unless the request in flight has done so."""
        with self._lock.lock:
            try:
                generation.bury()
            except PoolError as error:
                _log.warning("parallel workers failed while idle: %s", first_line(error))

    def _note_failure(self, error: PoolError) -> None:
        self._workers = None
        self._failures.note(error)

    def _refuse_plan(self, plan: ParallelPlan | None) -> None:
        if plan is not None and plan.ranks > len(self.devices):
            raise ValueError(
                f"plan {plan.describe()} needs {plan.ranks} ranks, the pool has {len(self.devices)}; "
                "name more devices or lower a degree"
            )


def _require_linux() -> None:
    missing = missing_system()
    if missing is not None:
        raise PoolError(missing, remedy=STOCK_NODES)
