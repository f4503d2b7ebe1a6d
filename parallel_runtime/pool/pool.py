"""The pool: one set of workers for a set of devices, asked one thing at a time.

Owns what callers see: starting, loading, stepping, closing; who may ask when; and when there is a new generation of
workers. Does not own what a generation holds and is asked (crew.py), nor how its ranks are watched and ended
(supervisor.py).

States: `stopped` -> `starting` -> `idle` <-> `loading`, `busy`. Any failure leads to `failed`, from which the next
call starts a fresh generation, until three have failed within a minute. Nothing that failed is ever asked again by the
pool itself.
"""

import itertools
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Literal

import torch

from ..checkpoint import ModelSpec
from ..devices import Device
from ..errors import PoolError
from ..patch import PRISTINE, PatchSet
from ..plan import ParallelPlan
from ..wire.protocol import MAX_RANKS, Op
from .arena import OUT
from .crew import Check, Crew, LoadResult, Model, Progress
from .deadlines import LOAD_S, REQUEST_S, START_S, Pace, checked
from .process import RankSettings
from .supervisor import TICK_S, Generation

State = Literal["stopped", "starting", "idle", "loading", "busy", "failed"]

ENGINE = "parallel_runtime.rank.engine:Engine"
SEGMENT_BYTES = 64 << 20  # of address space; memory is used where tensors have lain
MAX_FAILURES = 3
FAILURE_WINDOW_S = 60.0
RELEASE = "use Release Parallel Pool, then queue again"
FEWER_DEVICES = "run the doctor, and name fewer devices in SP Config"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepResult:
    """A step's result in memory of its own, the ranks' reports in rank order, and the time that the step took.

    The time is from copying the inputs to having the result, without loading, patching or starting that came before.
    """

    out: torch.Tensor
    ranks: list[dict[str, Any]]
    wall_s: float


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
    arrives damaged. By default where each rank has a CUDA device of its own.

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
        threads = max(1, _available_cpus() // len(devices)) if threads_per_rank is None else threads_per_rank
        if threads < 1:
            raise ValueError(f"threads_per_rank={threads} is below 1; use at least one thread")
        self.devices = devices
        self.deadline_s = checked(deadline_s)
        self.load_deadline_s = checked(max(load_deadline_s, deadline_s))
        self.generation = 0
        self._start_deadline_s = checked(start_deadline_s)
        self._pace = Pace()
        self._segment_bytes = segment_bytes
        self._memory_budget_bytes = memory_budget_bytes
        self._settings = RankSettings(devices=devices, threads=threads, engine=engine, python_path=python_path)
        self._check_peers = self._settings.backend == "nccl" if check_peers is None else check_peers
        self._lock = threading.Lock()
        self._owner: int | None = None  # the thread inside the lock
        self._numbers = itertools.count(1)
        self._crew: Crew | None = None
        self._failure_times: deque[float] = deque(maxlen=MAX_FAILURES)
        self._last_failure: PoolError | None = None

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
            return "stopped" if self._last_failure is None else "failed"
        if not crew.generation.ready:
            return "starting"
        if (request := crew.generation.in_flight) is not None and request.op is Op.LOAD:
            return "loading"
        return "busy" if request is not None or self._lock.locked() else "idle"

    def start(self, *, check_cancelled: Check | None = None) -> None:
        """Start the workers and wait until they are ready; nothing when they are. Raises PoolError."""
        with self._admitted(check_cancelled) as check:
            self._ready_crew(check)

    def load(
        self, spec: ModelSpec, *, progress: Progress | None = None, check_cancelled: Check | None = None
    ) -> LoadResult:
        """Have `spec` in the workers, starting them if need be; when it is there already, the result it had.

        `progress(loaded_bytes, total_bytes)` counts over all ranks. Raises PoolError when a rank fails.
        """
        with self._admitted(check_cancelled) as check:
            crew = self._ready_crew(check)
            model = crew.load(
                spec, check, progress=progress, deadline_s=self.load_deadline_s, budget_bytes=self._memory_budget_bytes
            )
            return model.result

    def unload(self, spec: ModelSpec) -> None:
        """Free `spec` in the workers; nothing when it is not there. Raises PoolError when a rank fails."""
        with self._admitted(None) as check:
            crew = self._settled_crew(check)
            if crew is not None:
                crew.unload(spec, check, deadline_s=self.deadline_s)

    def patch(self, spec: ModelSpec, patches: PatchSet, *, check_cancelled: Check | None = None) -> None:
        """Have `spec` in the workers with its weights pristine plus `patches`, merged; nothing when they are already.

        Raises PoolError when a rank fails, a patch that does not fit its weight included.
        """
        with self._admitted(check_cancelled) as check:
            self._patched_model(self._ready_crew(check), spec, patches, check)

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
        """One call of the model on `tensors`, which may lie on any device; the result is on the CPU.

        Loads the model, changes its weights and makes the plan's mesh where the workers lack them. Raises ValueError
        for tensors or options that cannot travel and for a plan with more ranks than devices, PoolError when a rank
        fails.
        """
        self._refuse_plan(plan)
        if OUT in tensors:
            raise ValueError(f"a tensor is named {OUT!r}, which is the result's name; rename it")
        with self._admitted(check_cancelled) as check:
            crew = self._ready_crew(check)
            model = self._patched_model(crew, spec, patches, check)
            mesh = crew.mesh(plan, check, deadline_s=self.deadline_s)
            shape = (spec, plan, tuple((name, tuple(tensor.shape)) for name, tensor in tensors.items()))
            began = time.perf_counter()
            out, ranks = crew.step(
                {"model": model.handle, "mesh": mesh, "options": dict(options)},
                tensors,
                check,
                out_shape=tuple(out_shape),
                out_dtype=out_dtype,
                deadline_s=self._pace.deadline_s(shape, least_s=self.deadline_s),
            )
            result = StepResult(out, ranks, time.perf_counter() - began)
            self._pace.note(shape, result.wall_s)
            return result

    def exchange_pattern(self, plan: ParallelPlan) -> list[int]:
        """Send a known pattern over the plan's mesh: how many bytes arrived wrong, by rank. Raises PoolError."""
        self._refuse_plan(plan)
        with self._admitted(None) as check:
            crew = self._ready_crew(check)
            mesh = crew.mesh(plan, check, deadline_s=self.deadline_s)
            return crew.check_pattern(mesh, check, deadline_s=self.deadline_s)

    def close(self) -> None:
        """End the workers; a request in flight in another thread comes to its end first. The pool can start again."""
        with self._admitted(None):
            crew, self._crew = self._crew, None
            if crew is not None:
                crew.generation.stop()
            self._failure_times.clear()
            self._last_failure = None
        if crew is not None:
            crew.generation.watcher.join()

    def status(self) -> dict[str, Any]:
        """What a user interface shows. Never waits; holds no path, only names of files."""
        crew, failure = self._crew, self._last_failure
        models = [] if crew is None else list(crew.models.items())
        return {
            "state": self.state,
            "generation": self.generation,
            "devices": [str(device) for device in self.devices],
            "pids": [] if crew is None else [rank.pid for rank in crew.generation.ranks],
            "models": [
                {"name": Path(spec.path).name, "dtype": spec.dtype, "ranks": model.result.ranks}
                for spec, model in models
            ],
            "meshes": [] if crew is None else [plan.name for plan in list(crew.meshes)],
            "memory": [] if crew is None else crew.memory,
            "peer_access": self._settings.peer_access,
            "last_failure": None if failure is None else _first_line(failure),
        }

    def _patched_model(self, crew: Crew, spec: ModelSpec, patches: PatchSet, check: Check) -> Model:
        model = crew.load(spec, check, deadline_s=self.load_deadline_s, budget_bytes=self._memory_budget_bytes)
        crew.patch(model, patches, check, deadline_s=self.deadline_s)
        return model

    @contextmanager
    def _admitted(self, check_cancelled: Check | None) -> Iterator[Check]:
        """Wait for our turn. Yields what to call now and then meanwhile."""
        check: Check = check_cancelled or _go_on
        if self._owner == threading.get_ident():
            raise RuntimeError("the pool was called from a callback of its own request; call it after the request")
        while not self._lock.acquire(timeout=TICK_S):
            check()
        self._owner = threading.get_ident()
        try:
            yield check
        finally:
            self._owner = None
            self._lock.release()

    def _ready_crew(self, check: Check) -> Crew:
        """Workers that owe nothing and wait for a request; fresh ones where there are none."""
        crew = self._settled_crew(check) or self._fresh_crew(check)
        while self._check_peers and not crew.copies_are_sound:
            crew = self._check_copies(crew, check)
        return crew

    def _check_copies(self, crew: Crew, check: Check) -> Crew:
        """See whether ranks get what others send them. If not, other workers that copy through the host's memory."""
        wrong = crew.damaged_copies(check, deadline_s=self.deadline_s)
        if not wrong:
            return crew
        if not self._settings.peer_access:
            raise crew.generation.fail(PoolError(f"{wrong} even without peer access", remedy=FEWER_DEVICES))
        _log.warning("%s; starting the workers again without peer access between GPUs, which is slower", wrong)
        crew.generation.stop()
        self._crew = None
        self._settings = replace(self._settings, peer_access=False)
        return self._fresh_crew(check)

    def _fresh_crew(self, check: Check) -> Crew:
        self._refuse_storm()
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
            _log.warning("parallel workers failed after a cancelled request: %s", _first_line(error))
            return None
        return crew

    def _bury(self, generation: Generation) -> None:
        """Called by the watcher when a rank has died: end the others unless the request in flight has done so."""
        with self._lock:
            try:
                generation.bury()
            except PoolError as error:
                _log.warning("parallel workers failed while idle: %s", _first_line(error))

    def _note_failure(self, error: PoolError) -> None:
        self._crew = None
        # A copy: the error itself will carry the caller's frames, and with them its tensors.
        self._last_failure = PoolError(error.cause, rank=error.rank, remedy=error.remedy, detail=error.detail)
        self._failure_times.append(time.monotonic())

    def _refuse_storm(self) -> None:
        """Workers that fail again and again need the user, not another start."""
        times = self._failure_times
        if len(times) == MAX_FAILURES and times[-1] - times[0] <= FAILURE_WINDOW_S and self._last_failure is not None:
            raise PoolError(
                f"the workers failed {MAX_FAILURES} times in {times[-1] - times[0]:.0f} s, "
                f"last with: {self._last_failure.cause}",
                rank=self._last_failure.rank,
                remedy=RELEASE,
                detail=self._last_failure.detail,
            )

    def _refuse_plan(self, plan: ParallelPlan) -> None:
        if plan.ranks > len(self.devices):
            raise ValueError(
                f"plan {plan.describe()} needs {plan.ranks} ranks, the pool has {len(self.devices)}; "
                "name more devices or lower a degree"
            )


def _go_on() -> None:
    """What a request that nobody cancels calls now and then."""


def _first_line(error: PoolError) -> str:
    return str(error).partition("\n")[0]


def _available_cpus() -> int:
    """The CPUs that this process may use: a container or taskset may leave it fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _require_linux() -> None:
    if sys.platform != "linux":
        raise PoolError(f"workers need Linux, this is {sys.platform}", remedy="use stock nodes on this system")
