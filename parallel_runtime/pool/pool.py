"""The pool: one set of workers for a set of devices, asked one thing at a time.

Owns what callers see: starting, loading, running, closing; that one asks at a time, and when there is a new generation
of workers. Does not own what one holds and is asked (worker_group.py), nor how its ranks are asked, watched and ended
(generation.py).

States: `stopped` -> `starting` -> `idle` <-> `loading`, `compiling`, `busy`. Any failure leads to `failed`, from which
the next call starts a fresh generation, until three have failed within a minute. Nothing that failed is ever asked
again by the pool itself.
"""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any

from ..checkpoint import ModelSpec
from ..devices import STOCK_NODES, Device, missing_system
from ..errors import BESIDE_BLOCKS, BrokenCopiesError, OutOfMemoryInRankError, PoolError, SilentWorkersError
from ..exchange_groups import OverlapRates
from ..machines.machine import Machine
from ..model_call import ModelCall
from ..plan import MAX_RANKS, Layout, ParallelPlan, refuse_unfit_machines
from ..process import nccl_files
from ..process.environment import RankSettings
from ..process.rank_process import available_cpus
from ..weight_delta import PRISTINE, WeightDeltas
from ..wire.protocol import Op
from ..wire.replies import MeasureReply, ProbeReply
from ..wire.requests import MeasureDevice, Probe
from .calls import RunResult, StepDone, WorkerLoopResult, WorkerLoopRun, refuse_unfit_loop, split_rows
from .failures import Failures, refuse_without
from .generation import Answer, Generation
from .held_vae import HeldVae
from .held_weights import Check, LoadResult, OnProgress
from .known_errors import NO_CUMEM
from .peer_access import PeerAccess
from .ranks import LOAD_S, PEER_CHECK_S, REQUEST_S, START_S, checked
from .status import State, describe, first_line, memory_of
from .worker_group import WorkerGroup

ENGINE = "parallel_runtime.worker.engine:Engine"
SEGMENT_BYTES = 64 << 20  # of address space; memory is used where tensors have lain
WAIT_S = 0.05  # how often a caller that waits for the lock is asked whether to go on
GIVEN_UP_S = 0.2  # between looks at a request that its caller gave up
FEWER_DEVICES = f"run the doctor, and name fewer devices in SP Config, or {NO_CUMEM}"

_log = logging.getLogger(__name__)


class _NotYetError(Exception):
    """Ranks are still busy."""


def _until(end_s: float) -> Check:
    def check() -> None:
        if time.monotonic() > end_s:
            raise _NotYetError

    return check


def _all_at_once(_: ParallelPlan) -> None:
    """Nothing is known of devices and link."""


class Pool:
    """Workers on `devices`, one a rank, in rank order. Usable from any thread; one request at a time, others wait.

    `threads_per_rank`: CPU threads of each rank, by default the CPUs this process may use, shared out over the ranks.
    `deadline_s`: how long a request may show no sign of life (generation.py); `start_deadline_s` and
    `load_deadline_s`: the same for starting, and for loading a model.
    `engine`: "module:Class" of what answers the requests, found in the pack or in the folders of `python_path`.
    `segment_bytes`: address space for the tensors of one request; bigger requests get further segments.
    `memory_budget_bytes`: weights that a rank may hold; the models used longest ago are evicted for one that is loaded.
    By default as much as its device has free.
    `check_peers`: exchange a known pattern after each start, and start again without peer access between GPUs when it
    arrives damaged or not at all, or when the start itself fails as with broken copies. By default where each rank has
    a CUDA device of its own.

    `machines(check)`: further machines, whose ranks follow those of this one, in order; asked when workers start, and
    again when a plan needs more ranks than there are. It may wait, and calls `check` meanwhile. Their devices may be
    named among `devices`, at the end.

    `overlap(plan)`: what is known of devices and link, by which ranks of a plan send heads of attention in chunks; by
    default nothing, and they send all at once.

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
        machines: Callable[[Check], Sequence[Machine]] | None = None,
        overlap: Callable[[ParallelPlan], OverlapRates | None] = _all_at_once,
    ) -> None:
        if not 1 <= len(devices) <= MAX_RANKS:
            raise ValueError(f"{len(devices)} devices for a pool; name 1 to {MAX_RANKS}")
        here = tuple(device for device in devices if not device.machine)
        if not here:
            raise ValueError("no device of this machine for a pool; name one, whose rank passes results on")
        threads = max(1, available_cpus() // len(here)) if threads_per_rank is None else threads_per_rank
        if threads < 1:
            raise ValueError(f"threads_per_rank={threads} is below 1; use at least one thread")
        self.devices = devices
        self.threads_per_rank = threads
        self.deadline_s = checked(deadline_s)
        self.generation = 0  # how many sets of workers there have been, the present one included
        self._start_deadline_s = checked(start_deadline_s)
        self._load_deadline_s = checked(max(load_deadline_s, deadline_s))
        self._segment_bytes, self._budget_bytes = segment_bytes, memory_budget_bytes
        self._machines, self._overlap = machines, overlap
        self._lean = False
        self._lock, self._asked_by = threading.Lock(), 0  # and the thread inside the lock
        self._waiting = set[int]()  # and those that wait for it to free weights
        self._settling: WorkerGroup | None = None  # what a thread takes in from
        self.released = 0  # sets of workers that were ended, and did not fail
        self._workers: WorkerGroup | None = None
        self._failures = Failures()
        self._requests = itertools.count(1)  # their numbers, which rise over all generations
        self._ranks = RankSettings(devices=here, threads=threads, engine=engine, python_path=python_path)
        checks = self._ranks.backend == "nccl" if check_peers is None else check_peers
        self._peers = PeerAccess(devices, checked=checks)

    def __enter__(self) -> "Pool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def broken_copies(self) -> str:
        """Why ranks do without peer access between GPUs; "" while they use it."""
        return self._peers.why_not

    @property
    def last_failure(self) -> PoolError | None:
        """That of the workers, since they were released; None without one. Never waits."""
        return self._failures.last

    @property
    def asked_here(self) -> bool:
        """Whether this thread is in a callback of a request, from which the pool takes no other."""
        return self._asked_by == threading.get_ident()

    @property
    def is_waited_for(self) -> bool:
        """Whether a thread waits until it may free weights or end the workers. Never waits."""
        return bool(self._waiting)

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
        return "busy" if request is not None or self._lock.locked() else "idle"

    def start(self, *, check_cancelled: Check | None = None) -> None:
        """Start the workers and wait until they are ready; nothing when they are. Raises PoolError."""
        with self._asking(check_cancelled) as check:
            self._ready(check)

    def load(
        self,
        spec: ModelSpec,
        plan: ParallelPlan | None = None,
        *,
        deltas: WeightDeltas | None = None,
        progress: OnProgress | None = None,
        check_cancelled: Check | None = None,
    ) -> LoadResult:
        """Have `spec` in the workers as `plan` needs it, without a plan replicated on every rank.

        Given `deltas`, its weights are pristine plus these then; else whatever they were. Starts the workers if need
        be; when the model is there already, this is the result that it had. `progress(loaded_bytes, total_bytes)`
        counts over the ranks that load. Raises PoolError when a rank fails, a delta that does not fit its weight
        included.
        """
        self._refuse_plan(plan)
        with self._asking(check_cancelled) as check:
            workers = self._ready(check, plan)
            model = workers.load(spec, plan, check, progress=progress)
            if deltas is not None:
                workers.apply_deltas(model, deltas, check)
            return model.result

    def unload(self, spec: ModelSpec, plan: ParallelPlan | None = None) -> None:
        """Free `spec` in the workers, with a plan only as that plan needs it; nothing when it is not there.

        Raises PoolError when a rank fails.
        """
        with self._asking(None, frees=True) as check:
            workers = self._settled(check)
            if workers is not None:
                workers.unload(spec, None if plan is None else plan.layout, check)

    def give_back(self, devices: Sequence[Device], *, of_run: bool = False, graphs: bool = False) -> None:
        """A sampling run has ended: others that compute on `devices` get the memory that is only kept there for later,
        but that of `graphs` of blocks where they may stay.

        Nothing where no rank computes on them, but with `of_run`, for what ranks keep of the run, and with `graphs`,
        which are to go before a run without them; and where there are no workers. While those are still busy with a
        request that was given up, this is not waited for and done after it. Raises PoolError when a rank fails.
        """
        ranks = [rank for rank, device in enumerate(self.devices) if device in devices]
        if not (ranks or of_run or graphs):
            return
        with self._asking(None) as check:
            workers = self._workers
            if workers is None or not workers.generation.ready:
                return
            if workers.owes_something:
                workers.owe_trim(ranks)
            else:
                workers.trim(ranks, check, graphs=graphs)

    def holds(self, spec: ModelSpec, plan: ParallelPlan | None = None) -> bool:
        """Whether the living workers have `spec` as `plan` needs it, without a plan replicated on every rank.

        Never waits.
        """
        workers, held = self._workers, self.layout_of(spec, plan)
        return workers is not None and held is not None and held.serves(workers.layout_for(plan))

    def layout_of(self, spec: ModelSpec, plan: ParallelPlan | None = None) -> Layout | None:
        """How the living workers hold `spec`, on however many ranks, of layouts of the plan's kind. Never waits."""
        workers = self._workers
        if workers is None or workers.generation.ended:
            return None
        model = workers.models.find(spec, workers.layout_for(plan))
        return None if model is None else model.layout

    def run(
        self,
        spec: ModelSpec,
        plan: ParallelPlan,
        calls: Sequence[ModelCall],
        *,
        deltas: WeightDeltas = PRISTINE,
        on_sent: Callable[[], None] = lambda: None,
        check_cancelled: Check | None = None,
    ) -> RunResult:
        """Any number of calls of the model in one request, their rows shared out over the plan's batch groups.

        Loads the model, changes its weights and makes the plan's mesh where the workers lack them. `on_sent` is called
        once the ranks have the request; raising there cancels. The results are on the CPU. Raises ValueError for no
        calls, a call without rows, tensors or options that cannot travel and a plan with more ranks than devices,
        PoolError when a rank fails.
        """
        self._refuse_plan(plan)
        batch_groups = split_rows(calls, plan)
        with self._asking(check_cancelled) as check:
            workers = self._ready(check, plan)
            model = workers.ensure(spec, plan, deltas, check)
            return workers.run(model, plan, calls, batch_groups, check, on_sent=on_sent)

    def sample(
        self,
        spec: ModelSpec,
        plan: ParallelPlan,
        run: WorkerLoopRun,
        *,
        deltas: WeightDeltas = PRISTINE,
        on_step: StepDone = lambda _, __: None,
        check_cancelled: Check | None = None,
    ) -> WorkerLoopResult:
        """A whole sampling run in the workers; cancelled, it ends at most one step after the one it is in.

        `on_step(step, denoised)` is called in order with each step's denoised latent (B, S, C) fp32; raising there
        cancels too.
        Loads, changes weights and raises as `run`; `ValueError` also for what `refuse_unfit_loop` says.
        """
        self._refuse_plan(plan)
        refuse_unfit_loop(plan, run.conds, run.cache)
        with self._asking(check_cancelled) as check:
            workers = self._ready(check, plan)
            model = workers.ensure(spec, plan, deltas, check)
            return workers.sample(model, plan, run, check, on_step=on_step)

    def vae(self, ask: Callable[[HeldVae, Check], Answer], *, check_cancelled: Check | None = None) -> Answer:
        """What `ask(held, check)` finds of the VAE that ranks hold; starts the workers if need be. Raises PoolError."""
        with self._asking(check_cancelled) as check:
            return ask((self._settled(check) or self._ready(check)).vae, check)

    def measure_devices(self, check_cancelled: Check | None = None) -> list[MeasureReply]:
        """Each rank's device, measured by all ranks at once, in rank order. Raises PoolError."""
        with self._asking(check_cancelled) as check:
            return self._ready(check).generation.ask(MeasureDevice(), check)

    def exchange_pattern(self, plan: ParallelPlan) -> list[int]:
        """Send a known pattern over the plan's mesh: how many bytes arrived wrong, by rank. Raises PoolError."""
        self._refuse_plan(plan)
        with self._asking(None) as check:
            workers = self._ready(check, plan)
            return workers.check_pattern(plan, check)

    def probe(self, plan: ParallelPlan) -> list[ProbeReply]:
        """Amounts and seconds of matrices, attention, memory and exchanges over ulysses, by rank. Raises PoolError."""
        self._refuse_plan(plan)
        with self._asking(None) as check:
            workers = self._ready(check)  # a plan that no model runs may be probed
            workers.make_mesh(plan, check)
            return workers.generation.ask(Probe(plan=plan), check)

    def retract_failure(self) -> None:
        """The last failure was dealt with by its caller: it is not shown, and does not count towards too many."""
        with self._asking(None):
            self._failures.retract()

    def close(self) -> None:
        """End the workers; a request in flight in another thread comes to its end first. The pool can start again."""
        with self._asking(None, frees=True):
            workers = self._stop()
        if workers is not None:
            workers.generation.watcher.join()

    def memory(self) -> list[dict[str, int]]:
        """As in `status`, which says more and takes longer: this is asked in each step."""
        return memory_of(self._workers)

    def status(self) -> dict[str, Any]:
        """What a user interface shows. Never waits; holds no path, only names of files."""
        return describe(
            state=self.state,
            generation=self.generation,
            devices=self.devices,
            workers=self._workers,
            failure=self._failures.last,
            peer_access=self._peers.used,
        )

    @contextmanager
    def _asking(self, check_cancelled: Check | None, *, frees: bool = False) -> Iterator[Check]:
        """Wait until no other thread asks. Yields what to call now and then meanwhile. `frees`: as `is_waited_for`.

        What a request that was given up leaves in the ranks is taken in soon, though nobody asks.

        Raises whatever `check_cancelled` raises, and `RuntimeError` when this thread is asking already.
        """
        check: Check = check_cancelled or (lambda: None)
        if self.asked_here:
            raise RuntimeError("the pool was called from a callback of its own request; call it after the request")
        here = threading.get_ident()
        if frees:
            self._waiting.add(here)
        try:
            while not self._lock.acquire(timeout=WAIT_S):
                check()
        finally:
            self._waiting.discard(here)
        self._asked_by = here
        try:
            yield check
        finally:
            if (workers := self._workers) is not None and workers.owes_something:
                self._settle_soon(workers)
            self._asked_by = 0
            self._lock.release()

    def _ready(self, check: Check, plan: ParallelPlan | None = None) -> WorkerGroup:
        """Workers that owe nothing and wait for a request; fresh ones where there are none, or too few for the plan.

        Raises ValueError for a plan that the machines which are there cannot run.
        """
        before, workers = self._failures.last, self._settled(check)
        died = self._failures.last
        if plan is not None and self._machines is not None and died is not None and died is not before:
            refuse_without(plan, self.devices, self._machines(check), died)
        if workers is not None and self._machines is not None and workers.too_few_for(plan, self._machines, check):
            self._stop()
            workers = None
        workers = self._with_sound_copies(workers, check)
        if plan is not None and self._machines is not None:
            refuse_unfit_machines(plan, workers.generation.devices_by_machine)
        return workers

    def _stop(self) -> WorkerGroup | None:
        """End the workers, which are returned, and begin anew: earlier failures do not count any more."""
        workers = self._workers
        if workers is not None:
            self.released, self._workers = self.released + 1, None
            workers.generation.stop()
        self._lean = False
        self._failures.forget()
        return workers

    def _start(self, check: Check) -> WorkerGroup:
        """Fresh workers, once all of them have started. Raises PoolError where they may not, or do not."""
        self._failures.refuse_storm()
        missing = missing_system()
        if missing is not None:
            raise PoolError(missing, remedy=STOCK_NODES)
        if self._ranks.backend == "nccl" and (refused := nccl_files.refusal(nccl_files.present_files())) is not None:
            raise PoolError(refused, remedy=nccl_files.REMEDY)
        check()
        machines = () if self._machines is None else self._machines(check)
        self.generation += 1
        generation = Generation(
            self.generation,
            replace(self._ranks, peer_access=self._peers.used),
            self._requests,
            segment_bytes=self._segment_bytes,
            start_deadline_s=self._start_deadline_s,
            deadline_s=lambda: self.deadline_s,
            on_death=self._bury,
            on_failure=self._note_failure,
            machines=machines,
        )
        workers = self._workers = WorkerGroup(
            generation,
            load_deadline_s=self._load_deadline_s,
            budget_bytes=self._budget_bytes,
            check_copies=self._peers.checked,
            overlap=self._overlap,
            lean=self._lean,
        )
        workers.settle(check)
        return workers

    def _with_sound_copies(self, workers: WorkerGroup | None, check: Check) -> WorkerGroup:
        """These workers, or fresh ones, which get what others send them. Where they do not, or do not start, as with
        broken copies between GPUs, others that copy through the host's memory."""
        try:
            return self._checked(workers or self._start(check), check)
        except BrokenCopiesError as error:
            first = error
            if not self._peers.suspect:
                self._peers.try_again()
                raise
        except PoolError:
            self._peers.try_again()
            raise
        self._failures.retract()
        self._peers.leave(first.cause)
        _log.warning(
            "%s; starting the workers again without peer access between GPUs, which is slower", self.broken_copies
        )
        try:
            return self._checked(self._start(check), check)
        except PoolError as error:
            self._peers.try_again()
            raise error from first

    def _checked(self, workers: WorkerGroup, check: Check) -> WorkerGroup:
        """These workers, once each was seen to get what others send it. Raises BrokenCopiesError where one does not."""
        if workers.copies_are_sound:
            return workers
        deadline_s = PEER_CHECK_S if self.deadline_s == REQUEST_S else self.deadline_s
        failed, detail = None, ""
        try:
            wrong = workers.damaged_copies(check, deadline_s=deadline_s)
        except (SilentWorkersError, BrokenCopiesError) as error:
            failed, detail = error, error.detail
            wrong = f"copies between devices do not arrive ({error.cause})"
            self._failures.retract()
        if not wrong:
            self._peers.worked()
            return workers
        if not self._peers.used:
            wrong = f"{wrong} even without peer access"
        raise workers.generation.fail(BrokenCopiesError(wrong, remedy=FEWER_DEVICES, detail=detail)) from failed

    def _bury(self, generation: Generation) -> None:
        """Called by the watcher when a rank has died: end the others unless the request in flight has done so."""
        with self._lock:
            try:
                generation.bury()
            except PoolError as error:
                _log.warning("parallel workers failed while idle: %s", first_line(error))

    def _note_failure(self, error: PoolError) -> None:
        self._workers = None
        if isinstance(error, OutOfMemoryInRankError) and BESIDE_BLOCKS in str(error):
            self._lean = True
            _log.warning("from now on, no block of sharded or offloaded weights stays whole on these devices")
        self._failures.note(error)

    def _settled(self, check: Check) -> WorkerGroup | None:
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

    def _settle_soon(self, workers: WorkerGroup) -> None:
        """Have a thread take in what a request that was given up leaves behind, though nobody asks."""
        if self._settling is workers:
            return
        thread = threading.Thread(target=self._settle_later, args=(workers,), name="parallel-dit-given-up", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the system has no thread more: the next request takes it in
            _log.warning("what a cancelled request left stays until the next one: %s", error)
        else:
            self._settling = workers

    def _settle_later(self, workers: WorkerGroup) -> None:
        """Take it in, a moment at a time, between which others may ask."""
        over = False
        while not over:
            time.sleep(GIVEN_UP_S)
            with self._asking(None):
                over = True  # whatever happens
                try:
                    if self._workers is workers:
                        self._settled(_until(time.monotonic() + WAIT_S))
                except _NotYetError:
                    over = False
                finally:
                    # under the lock: what is left from now on is for another thread
                    if over and self._settling is workers:
                        self._settling = None

    def _refuse_plan(self, plan: ParallelPlan | None) -> None:
        if plan is not None and self._machines is None and plan.ranks > len(self.devices):
            raise ValueError(
                f"plan {plan.describe()} needs {plan.ranks} ranks, the pool has {len(self.devices)}; "
                "name more devices or lower a degree"
            )
