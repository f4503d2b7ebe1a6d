"""When one pool has new workers: where there are none, and where those that there are do not hear each other.

Owns the living generation, the settings that the next one starts with, and what becomes of one that failed. Does not
own who may ask and when (pool.py), what a generation holds and is asked (worker_group.py), how its ranks are watched
and ended (supervisor.py), nor when failures are too many (failures.py).
"""

import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..devices import STOCK_NODES, missing_system
from ..errors import PoolError, SilentWorkersError
from ..exchange_groups import OverlapRates
from ..machines.machine import Machine
from ..plan import ParallelPlan
from ..rank_environment import RankSettings
from . import nccl_files
from .deadlines import PEER_CHECK_S
from .failures import Failures
from .held_weights import Check
from .status import first_line
from .supervisor import Generation
from .worker_group import WorkerGroup

FEWER_DEVICES = "run the doctor, and name fewer devices in SP Config"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """What every generation of a pool has; fields as the arguments of `Pool`, `deadline_s()` as it is now."""

    deadline_s: Callable[[], float]
    start_deadline_s: float
    load_deadline_s: float
    segment_bytes: int
    budget_bytes: int | None
    check_peers: bool
    machines: Callable[[Check], Sequence[Machine]]
    overlap: Callable[[ParallelPlan], OverlapRates | None]


class Generations:
    """One generation after another; `number` counts them, `workers` is the present one. Use it inside `lock`.

    `lock` is taken to end a generation whose rank died while nobody asked. Raises PoolError when workers do not start.
    """

    def __init__(self, ranks: RankSettings, settings: WorkerSettings, *, lock: threading.Lock) -> None:
        self.number = 0
        self.workers: WorkerGroup | None = None
        self.failures = Failures()
        self._ranks, self._settings, self._lock = ranks, settings, lock
        self._requests = itertools.count(1)  # their numbers, which rise over all generations

    @property
    def peer_access(self) -> bool:
        """Whether GPUs may copy from each other's memory."""
        return self._ranks.peer_access

    def stop(self) -> WorkerGroup | None:
        """End the workers, which are returned, and begin anew: earlier failures do not count any more."""
        workers, self.workers = self.workers, None
        if workers is not None:
            workers.generation.stop()
        self.failures.forget()
        return workers

    def start(self, check: Check) -> WorkerGroup:
        """Fresh workers, once all of them have started. Raises PoolError where they may not, or do not."""
        self.failures.refuse_storm()
        missing = missing_system()
        if missing is not None:
            raise PoolError(missing, remedy=STOCK_NODES)
        if self._ranks.backend == "nccl" and (refused := nccl_files.refusal(nccl_files.present_files())) is not None:
            raise PoolError(refused, remedy=nccl_files.REMEDY)
        check()
        self.number += 1
        settings = self._settings
        generation = Generation(
            self.number,
            self._ranks,
            segment_bytes=settings.segment_bytes,
            start_deadline_s=settings.start_deadline_s,
            deadline_s=settings.deadline_s,
            on_death=self._bury,
            on_failure=self._note_failure,
            machines=settings.machines(check),
        )
        workers = self.workers = WorkerGroup(
            generation,
            self._requests,
            deadline_s=settings.deadline_s,
            load_deadline_s=settings.load_deadline_s,
            budget_bytes=settings.budget_bytes,
            check_copies=settings.check_peers,
            overlap=settings.overlap,
        )
        workers.settle(check)
        return workers

    def check_copies(self, workers: WorkerGroup, check: Check) -> WorkerGroup:
        """See whether ranks get what others send them. If not, other workers that copy through the host's memory."""
        hangs = None
        try:
            wrong = workers.damaged_copies(check, deadline_s=min(self._settings.deadline_s(), PEER_CHECK_S))
        except SilentWorkersError as error:
            hangs, wrong = error, f"copies between devices do not arrive ({error.cause})"
            self.failures.retract()
        if not wrong:
            return workers
        if not self.peer_access:
            unsound = PoolError(f"{wrong} even without peer access", remedy=FEWER_DEVICES)
            raise workers.generation.fail(unsound) from hangs
        _log.warning("%s; starting the workers again without peer access between GPUs, which is slower", wrong)
        workers.generation.stop()
        self.workers = None
        self._ranks = replace(self._ranks, peer_access=False)
        return self.start(check)

    def _bury(self, generation: Generation) -> None:
        """Called by the watcher when a rank has died: end the others unless the request in flight has done so."""
        with self._lock:
            try:
                generation.bury()
            except PoolError as error:
                _log.warning("parallel workers failed while idle: %s", first_line(error))

    def _note_failure(self, error: PoolError) -> None:
        self.workers = None
        self.failures.note(error)
