"""Who may ask the workers of one pool, and when it has new ones: where there are none, or they do not hear each other.

Owns that one asks at a time, the living generation, the settings that the next one starts with, and what becomes of one
that failed. Does not own what callers see (pool.py), what a generation holds and is asked (worker_group.py), how its
ranks are watched and ended (supervisor.py), nor when failures are too many (failures.py).
"""

import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from ..devices import STOCK_NODES, missing_system
from ..errors import PoolError, SilentWorkersError
from . import nccl_files
from .deadlines import PEER_CHECK_S
from .failures import Failures
from .held_weights import Check
from .process import RankSettings
from .status import first_line
from .supervisor import Generation
from .worker_group import WorkerGroup

WAIT_S = 0.05  # how often one who waits for the lock is asked whether to go on
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


class RequestLock:
    """One request at a time, from any thread; the others wait. `lock` is for those who cannot give up."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._owner: int | None = None  # the thread inside the lock

    @property
    def taken(self) -> bool:
        """Whether somebody has the lock. Never waits."""
        return self.lock.locked()

    @contextmanager
    def acquire(self, check_cancelled: Callable[[], None] | None) -> Iterator[Callable[[], None]]:
        """Wait for the lock. Yields what to call now and then meanwhile.

        Raises whatever `check_cancelled` raises, and `RuntimeError` when this thread has the lock already.
        """
        check: Callable[[], None] = check_cancelled or _go_on
        if self._owner == threading.get_ident():
            raise RuntimeError("the pool was called from a callback of its own request; call it after the request")
        while not self.lock.acquire(timeout=WAIT_S):
            check()
        self._owner = threading.get_ident()
        try:
            yield check
        finally:
            self._owner = None
            self.lock.release()


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

    def ready(self, check: Check) -> WorkerGroup:
        """Workers that owe nothing and wait for a request; fresh ones where there are none."""
        workers = self.settled(check) or self._fresh(check)
        while self._settings.check_peers and not workers.copies_are_sound:
            workers = self._check_copies(workers, check)
        return workers

    def settled(self, check: Check) -> WorkerGroup | None:
        """The living workers, once they owe nothing; None when there are none, or none any more."""
        workers = self.workers
        if workers is None:
            return None
        try:
            workers.settle(check)
        except PoolError as error:  # of a request that its caller gave up: not the failure of the present one
            _log.warning("parallel workers failed before this request: %s", first_line(error))
            return None
        return workers

    def stop(self) -> WorkerGroup | None:
        """End the workers, which are returned, and begin anew: earlier failures do not count any more."""
        workers, self.workers = self.workers, None
        if workers is not None:
            workers.generation.stop()
        self.failures.forget()
        return workers

    def _fresh(self, check: Check) -> WorkerGroup:
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
            on_death=self._bury,
            on_failure=self._note_failure,
        )
        workers = self.workers = WorkerGroup(
            generation,
            self._requests,
            deadline_s=settings.deadline_s,
            load_deadline_s=settings.load_deadline_s,
            budget_bytes=settings.budget_bytes,
        )
        workers.settle(check)
        return workers

    def _check_copies(self, workers: WorkerGroup, check: Check) -> WorkerGroup:
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
        return self._fresh(check)

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


def _go_on() -> None:
    """What a request that nobody cancels calls now and then."""
