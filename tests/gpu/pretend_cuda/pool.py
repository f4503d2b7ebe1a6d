"""Pools whose ranks have pretend devices, and one run of a plan on them against CPU ranks."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu.cases import Case, Reference
from gpu.graph_chapters import CHAPTERS
from gpu.pretend_cuda.library import library
from host import forked_ranks
from parallel_runtime.devices import Device
from parallel_runtime.errors import PoolError
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.pool import Pool
from parallel_runtime.process import rank_process

GPU = Path(__file__).resolve().parents[1]
ENGINE = "pretend_cuda.engine:PretendEngine"
RANK = "pretend_cuda.rank"
DEADLOCK_S = 10.0


@contextmanager
def pretending() -> Iterator[None]:
    """This process's pools fork their ranks, and ranks on a GPU pretend theirs meanwhile."""
    library()
    forked_ranks.OURS.add(RANK)
    forked_ranks.fork_ranks()
    spawn = rank_process.spawn_owned

    def spawn_owned(module: str, arguments: Mapping[str, object], *more: Any) -> rank_process.OwnedProcess:
        return spawn(RANK if str(arguments.get("device")).startswith("cuda") else module, arguments, *more)

    rank_process.spawn_owned = spawn_owned
    try:
        yield
    finally:
        rank_process.spawn_owned = spawn


@dataclass(frozen=True, kw_only=True)
class Trial(Case):
    """A case and the device it runs on. `shared`: all ranks on one device, which exchange through the host.

    `before`: plans whose groups are made first. `graphs`: a chapter of graph_chapters.py in a run's place.
    """

    dtype: str = "float32"
    launches_wait: bool = False
    shared: bool = False
    before: tuple[str, ...] = ()
    graphs: str = ""


class PretendPool(Pool):
    """A pool on `cuda:0` and so on, or with `shared` all ranks on `cuda:0`. `folder` is its own, for its settings."""

    def __init__(self, ranks: int, folder: Path, *, shared: bool = False) -> None:
        self._folder = folder
        self.tell({})
        devices = tuple(Device("cuda", 0 if shared else index) for index in range(ranks))
        path = (str(GPU), str(folder))
        super().__init__(devices, threads_per_rank=1, engine=ENGINE, python_path=path, deadline_s=60.0)

    def wrong(self, reference: Reference, trial: Trial, **settings: object) -> str:
        """What is wrong with a trial's result, nothing when it is right. A failure is its error's first line."""
        self._failures.forget()  # three in a minute are too many for a pool, not for this
        self._peers.leave("")  # as a new pool
        self.tell({"launches_wait": trial.launches_wait, **settings})
        try:
            if trial.graphs:
                return CHAPTERS[trial.graphs](self, trial.parallel_plan)
            for plan in map(ParallelPlan.parse, (*trial.before, trial.plan)):
                if any(self.exchange_pattern(plan)):
                    return f"bytes arrive damaged under {plan.describe()}"
            error = reference.error(self, trial, {}, dtype=trial.dtype)
        except PoolError as failure:
            return str(failure).splitlines()[0]
        if self.broken_copies:  # workers that were started without the mistake computed this
            return self.broken_copies
        limit = reference.limit(trial.dtype)
        return "" if error <= limit else f"differs by {error:.1e}, more than {limit:.1e}"

    def sites(self) -> list[str]:
        """Where the product allocated since `record` was told, first come first; they are forgotten."""
        notes = self._folder / "sites.txt"
        found = list(dict.fromkeys(notes.read_text(encoding="utf-8").splitlines()))
        notes.unlink()
        return found

    def tell(self, settings: Mapping[str, object]) -> None:
        """How requests are run from now on, and ranks started."""
        written = self._folder / "pretend.new"
        written.write_text(json.dumps({"deadline_s": DEADLOCK_S, **settings}), encoding="utf-8")
        written.replace(self._folder / "pretend.json")
