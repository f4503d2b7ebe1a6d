"""When a pool has new ranks, with other machines or without them, and what an interface is told of those it has.

Owns the start of a generation. Names of files are told, never a folder; figures, never a secret.
"""

import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ..devices import STOCK_NODES, Device, missing_system
from ..errors import PoolError, SilentWorkersError
from ..exchange_groups import OverlapRates
from ..machines.machine import Machine
from ..plan import ParallelPlan, refuse_unfit_machines
from ..rank_environment import RankSettings
from ..redact_paths import redact_paths
from . import nccl_files
from .failures import Failures
from .generation import PEER_CHECK_S, Generation
from .held_weights import Check
from .worker_group import WorkerGroup


def too_few(
    workers: WorkerGroup, plan: ParallelPlan | None, machines: Callable[[Check], Sequence[Machine]], check: Check
) -> bool:
    """Whether the plan, or anything without one, needs a machine that was left out, or one that has joined since.

    All ranks make a plan's groups together, so once a machine was left out only plans that have theirs run on.
    `machines` as `Pool` has it.
    """
    reach, all_ranks = workers.generation.reach(), len(workers.generation.ranks)
    if reach < all_ranks:
        held = [model.layout for model in workers.models]
        return plan is None or plan.ranks > reach or workers.meshes.change_for(plan, held, new_handle=int) is not None
    if plan is None or plan.ranks <= all_ranks:
        return False
    return any(machine not in workers.generation.machines for machine in machines(check))


def refuse_without(plan: ParallelPlan, devices: Sequence[Device], machines: Sequence[Machine], died: PoolError) -> None:
    """Raise PoolError, what ranks have died of since the last request, where the plan cannot run on the ranks that are
    left.

    `devices` as `Pool` has it, of this machine first; `machines` are those that are there.
    """
    here = sum(not device.machine for device in devices)
    try:
        refuse_unfit_machines(plan, [here, *(len(machine.devices) for machine in machines)])
    except ValueError:
        raise PoolError(  # a copy, so that what is remembered of the failure keeps no frame alive
            died.cause, rank=died.rank, device=died.device, remedy=died.remedy, detail=died.detail
        ) from None


State = Literal["stopped", "starting", "idle", "loading", "compiling", "busy", "failed"]


def describe(
    *,
    state: State,
    generation: int,
    devices: Sequence[Device],
    workers: WorkerGroup | None,
    failure: PoolError | None,
    peer_access: bool,
) -> dict[str, Any]:
    """Plain values for JSON. `plans` are those whose process groups the workers have, the one used last last."""
    models = [] if workers is None else list(workers.models)
    plans = [] if workers is None else list(workers.meshes)
    return {
        "state": state,
        "generation": generation,
        "devices": [str(device) for device in devices],
        "pids": [] if workers is None else [rank.pid for rank in workers.generation.ranks],
        "models": [
            {
                "name": Path(model.spec.path).name,
                "dtype": model.spec.dtype,
                "weights": model.layout.name,
                "held_by": model.layout.ranks,
            }
            for model in models
        ],
        "meshes": [plan.name for plan in plans],
        "plans": [plan.to_dict() for plan in plans],
        "spent": _spent(workers),
        "memory": [] if workers is None else [memory.known() for memory in workers.memory],
        "peer_access": peer_access,
        "last_failure": None if failure is None else first_line(failure),
        "failed_rank": None if failure is None else failure.rank,
    }


def _spent(workers: WorkerGroup | None) -> list[dict[str, float] | None]:
    """What each rank did so far in the run in the workers that is under way, as far as they say so; [] without one."""
    request = None if workers is None else workers.generation.in_flight
    if workers is None or request is None:
        return []
    said = [request.progress.get(rank.rank) for rank in workers.generation.ranks]
    return [None if each is None or each.spent is None else dict(vars(each.spent)) for each in said]


def first_line(error: PoolError) -> str:
    """Rank, cause and remedy, without the detail on further lines and without the folders of files."""
    return redact_paths(str(error).partition("\n")[0])


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

    `lock` is taken to end a generation whose rank died between requests. Raises PoolError when workers do not start.
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
