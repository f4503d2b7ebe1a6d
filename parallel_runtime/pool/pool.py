"""The pool: one set of workers for a set of devices, asked one thing at a time.

Owns what callers see: starting, loading, stepping, closing; who may ask when; and when there is a new generation of
workers. Does not own what a generation holds and is asked (crew.py), nor how its ranks are watched and ended
(supervisor.py).

States: `stopped` -> `starting` -> `idle` <-> `loading`, `compiling`, `busy`. Any failure leads to `failed`, from which
the next call starts a fresh generation, until three have failed within a minute. Nothing that failed is ever asked
again by the pool itself.
"""

import itertools
import logging
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from .crew import Check, Crew, Progress
from .deadlines import LOAD_S, PEER_CHECK_S, REQUEST_S, START_S, Pace, checked
from .failures import Failures
from .models import LoadResult, Model
from .process import RankSettings, available_cpus
from .resident import ResidentResult, ResidentRun, StepDone, refuse_unfit
from .status import State, describe, first_line
from .supervisor import Generation
from .turns import Turns

ENGINE = "parallel_runtime.rank.engine:Engine"
SEGMENT_BYTES = 64 << 20  # of address space; memory is used where tensors have lain
FEWER_DEVICES = "run the doctor, and name fewer devices in SP Config"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ensured:
    """A model with its weight patches and a plan's process groups, as found while the workers' contents were these."""

    contents: int
    model: Model
    mesh: int


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
        self._turns = Turns()
        self._numbers = itertools.count(1)
        self._crew: Crew | None = None
        self._ensured: dict[Hashable, Ensured] = {}
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
        crew = self._crew
        if crew is None:
            return "stopped" if self._failures.last is None else "failed"
        if not crew.generation.ready:
            return "starting"
        if (request := crew.generation.in_flight) is not None and request.op is Op.LOAD:
            return "loading"
        if request is not None and request.compiling:
            return "compiling"
        return "busy" if request is not None or self._turns.taken else "idle"

    def start(self, *, check_cancelled: Check | None = None) -> None:
        """Start the workers and wait until they are ready; nothing when they are. Raises PoolError."""
        with self._turns.admitted(check_cancelled) as check:
            self._ready_crew(check)

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
        with self._turns.admitted(check_cancelled) as check:
            return self._model(self._ready_crew(check), spec, plan, check, progress=progress).result

    def unload(self, spec: ModelSpec, plan: ParallelPlan | None = None) -> None:
        """Free `spec` in the workers, with a plan only as that plan needs it; nothing when it is not there.

        Raises PoolError when a rank fails.
        """
        with self._turns.admitted(None) as check:
            crew = self._settled_crew(check)
            if crew is not None:
                crew.unload(spec, None if plan is None else plan.layout, check, deadline_s=self.deadline_s)

    def give_back(self, devices: Sequence[Device]) -> None:
        """A sampling run has ended: others that compute on `devices` get the memory that is only kept there for later.

        Nothing where no rank computes on them, where there are no workers, and while those are still busy with a
        request that was given up: that is not waited for. Raises PoolError when a rank fails.
        """
        ranks = [rank for rank, device in enumerate(self.devices) if device in devices]
        if not ranks:
            return
        with self._turns.admitted(None) as check:
            crew = self._crew
            if crew is not None and crew.generation.ready and not crew.busy:
                crew.trim(ranks, check, deadline_s=self.deadline_s)

    def holds(self, spec: ModelSpec, plan: ParallelPlan | None = None) -> bool:
        """Whether the living workers have `spec` as `plan` needs it, without a plan replicated on every rank.

        Never waits.
        """
        crew, layout = self._crew, self._layout(plan)
        model = None if crew is None or crew.generation.ended else crew.models.find(spec, layout)
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
        with self._turns.admitted(check_cancelled) as check:
            return self._patched_model(self._ready_crew(check), spec, plan, patches, check, progress=progress).result

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
        with self._turns.admitted(check_cancelled) as check:
            crew = self._ready_crew(check)
            ensured = self._ensure(crew, spec, plan, patches, check)
            shape = (spec, plan, shape_of(calls))
            deadline_s = self._pace.deadline_s(shape, least_s=self.deadline_s)
            began = time.perf_counter()
            outs, ranks = crew.run(ensured.model, ensured.mesh, plan, calls, lanes, check, deadline_s=deadline_s)
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
        cancels too. A rank's report says its `step_s`, `prepare_s` and, with `release_modulations`, `released_bytes`.
        Loads, patches and raises as `run`; `ValueError` also for a run that the plan's stages do not fit.
        """
        self._refuse_plan(plan)
        refuse_unfit(plan, run)
        with self._turns.admitted(check_cancelled) as check:
            crew = self._ready_crew(check)
            ensured = self._ensure(crew, spec, plan, patches, check)
            began = time.perf_counter()
            out, ranks = crew.sample(
                ensured.model, ensured.mesh, plan, run, check, on_step=on_step, deadline_s=self.deadline_s
            )
            return ResidentResult(out, ranks, time.perf_counter() - began)

    def measure_devices(self, check_cancelled: Check | None = None) -> list[dict[str, Any]]:
        """Each rank's device, measured by all ranks at once, in rank order. Raises PoolError.

        `device`, `name`, `free_bytes`, `total_bytes` and `gflops`, of a matrix product, in 10^9 operations a second.
        """
        with self._turns.admitted(check_cancelled) as check:
            measured = self._ready_crew(check).measure(check, deadline_s=self.deadline_s)
        return [{"device": str(device)} | said for device, said in zip(self.devices, measured, strict=True)]

    def exchange_pattern(self, plan: ParallelPlan) -> list[int]:
        """Send a known pattern over the plan's mesh: how many bytes arrived wrong, by rank. Raises PoolError."""
        self._refuse_plan(plan)
        with self._turns.admitted(None) as check:
            crew = self._ready_crew(check)
            mesh = crew.mesh(plan, check, deadline_s=self.deadline_s)
            return crew.check_pattern(mesh, check, deadline_s=self.deadline_s)

    def close(self) -> None:
        """End the workers; a request in flight in another thread comes to its end first. The pool can start again."""
        with self._turns.admitted(None):
            crew, self._crew = self._crew, None
            if crew is not None:
                crew.generation.stop()
            self._failures.forget()
        if crew is not None:
            crew.generation.watcher.join()

    def status(self) -> dict[str, Any]:
        """What a user interface shows. Never waits; holds no path, only names of files."""
        return describe(
            state=self.state,
            generation=self.generation,
            devices=self.devices,
            crew=self._crew,
            failure=self._failures.last,
            peer_access=self._settings.peer_access,
        )

    def _layout(self, plan: ParallelPlan | None) -> Layout:
        return Layout(ranks=len(self.devices)) if plan is None else plan.layout

    def _model(
        self, crew: Crew, spec: ModelSpec, plan: ParallelPlan | None, check: Check, *, progress: Progress | None = None
    ) -> Model:
        layout = self._layout(plan)
        return crew.load(
            spec,
            layout,
            check,
            deadline_s=self.load_deadline_s,
            mesh=None if plan is None or layout.shards == 1 else crew.mesh(plan, check, deadline_s=self.deadline_s),
            progress=progress,
            budget_bytes=self._memory_budget_bytes,
        )

    def _ensure(self, crew: Crew, spec: ModelSpec, plan: ParallelPlan, patches: PatchSet, check: Check) -> Ensured:
        """The model, patched, and the plan's groups: looked for once, and again when the workers' contents changed."""
        use = (spec, plan, patches.name, patches.side_branch)
        ensured = self._ensured.get(use)
        if ensured is None or ensured.contents != crew.contents:
            model = self._patched_model(crew, spec, plan, patches, check)
            mesh = crew.mesh(plan, check, deadline_s=self.deadline_s)
            ensured = Ensured(crew.contents, model, mesh)
            still_true = {other: each for other, each in self._ensured.items() if each.contents == crew.contents}
            self._ensured = still_true | {use: ensured}
        crew.note_use(ensured.model, plan)
        return ensured

    def _patched_model(
        self,
        crew: Crew,
        spec: ModelSpec,
        plan: ParallelPlan | None,
        patches: PatchSet,
        check: Check,
        *,
        progress: Progress | None = None,
    ) -> Model:
        model = self._model(crew, spec, plan, check, progress=progress)
        crew.patch(model, patches, check, deadline_s=self.deadline_s)
        return model

    def _ready_crew(self, check: Check) -> Crew:
        """Workers that owe nothing and wait for a request; fresh ones where there are none."""
        crew = self._settled_crew(check) or self._fresh_crew(check)
        while self._check_peers and not crew.copies_are_sound:
            crew = self._check_copies(crew, check)
        return crew

    def _check_copies(self, crew: Crew, check: Check) -> Crew:
        """See whether ranks get what others send them. If not, other workers that copy through the host's memory."""
        hangs = None
        try:
            wrong = crew.damaged_copies(check, deadline_s=min(self.deadline_s, PEER_CHECK_S))
        except SilentWorkersError as error:
            hangs, wrong = error, f"copies between devices do not arrive ({error.cause})"
            self._failures.retract()
        if not wrong:
            return crew
        if not self._settings.peer_access:
            unsound = PoolError(f"{wrong} even without peer access", remedy=FEWER_DEVICES)
            raise crew.generation.fail(unsound) from hangs
        _log.warning("%s; starting the workers again without peer access between GPUs, which is slower", wrong)
        crew.generation.stop()
        self._crew = None
        self._settings = replace(self._settings, peer_access=False)
        return self._fresh_crew(check)

    def _fresh_crew(self, check: Check) -> Crew:
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
        crew = self._crew = Crew(generation, self._numbers)
        crew.settle(check, deadline_s=self.deadline_s)
        return crew

    def _settled_crew(self, check: Check) -> Crew | None:
        """The living workers, once they owe nothing; None when there are none, or none any more."""
        crew = self._crew
        if crew is None:
            return None
        try:
            crew.settle(check, deadline_s=self.deadline_s)
        except PoolError as error:  # of a request that its caller gave up: not the failure of the present one
            _log.warning("parallel workers failed before this request: %s", first_line(error))
            return None
        return crew

    def _bury(self, generation: Generation) -> None:
        """Called by the watcher when a rank has died: end the others unless the request in flight has done so."""
        with self._turns.lock:
            try:
                generation.bury()
            except PoolError as error:
                _log.warning("parallel workers failed while idle: %s", first_line(error))

    def _note_failure(self, error: PoolError) -> None:
        self._crew = None
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
