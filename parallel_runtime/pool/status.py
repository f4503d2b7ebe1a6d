"""What an interface is told of a pool: names of files, never a folder; figures, never a secret."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from ..devices import Device
from ..errors import PoolError
from ..redact_paths import redact_paths
from .worker_group import WorkerGroup

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
        "memory": memory_of(workers),
        "peer_access": peer_access,
        "last_failure": None if failure is None else first_line(failure),
        "failed_rank": None if failure is None else failure.rank,
    }


def memory_of(workers: WorkerGroup | None) -> list[dict[str, int]]:
    """Bytes that each rank last said that it occupies, by kind; [] without ranks."""
    return [] if workers is None else [memory.known() for memory in workers.generation.memory]


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
