"""Where the time of each rank goes in the run that is under way, for the panel: shares of what ranks measure anyway.

A loop in the workers tells with each step (`Pool.status`); of ComfyUI's own loop the requests are there, which the
report is made of. Owns the sums of those; sends no request, and adds nothing to a step.
"""

import weakref
from collections.abc import Mapping, Sequence

from ....parallel_runtime.wire.replies import WAITING, RankRun, RankStep, TimeSpent
from ..model.pools import Devices
from ..sampling.run_context import MeasuredRequest, Recorder, RunContext

PARTS = ("compute", "communication", "idle")


class LiveTimes:
    """The newest timed run on each set of devices. A recorder is not held: it ends with its run."""

    def __init__(self) -> None:
        self._runs: dict[Devices, _Requests] = {}

    def begins(self, run: RunContext) -> None:
        """A run begins; several of one list share a recorder, and count together."""
        if run.recorder is None:
            self._runs.pop(run.model.devices, None)
            return
        known = self._runs.get(run.model.devices)
        if known is None or known.recorder() is not run.recorder:
            self._runs[run.model.devices] = _Requests(run.recorder)

    def fractions(self, devices: Devices, told: Sequence[Mapping[str, float] | None]) -> list[dict[str, float] | None]:
        """How each rank's time so far divides into `PARTS`, in hundredths; None of a rank of which nothing is known.

        `told` is what ranks say of a loop of their own, by rank, [] without one.
        """
        run = self._runs.get(devices)
        spent = list(told) if any(told) else [] if run is None else run.spent()
        return [_fractions(each) for each in spent] + [None] * (len(devices) - len(spent))


class _Requests:
    """The requests of one recorder, each looked at once."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = weakref.ref(recorder)
        self._taken = len(recorder.requests)
        self._began_s = self._ended_s = 0.0
        self._by_rank: dict[int, tuple[float, float]] = {}  # seconds busy and, of these, waiting

    def spent(self) -> list[dict[str, float] | None]:
        """By rank, up to the last of which anything is known."""
        recorder = self.recorder()
        for request in [] if recorder is None else recorder.requests[self._taken :]:
            self._take(request)
            self._taken += 1
        wall_s, found = self._ended_s - self._began_s, list[dict[str, float] | None]()
        for rank in range(max(self._by_rank, default=-1) + 1):
            busy_s, waited_s = self._by_rank.get(rank, (0.0, 0.0))
            spent = TimeSpent(
                compute_s=max(0.0, busy_s - waited_s), communication_s=waited_s, idle_s=max(0.0, wall_s - busy_s)
            )
            found.append(dict(vars(spent)) if rank in self._by_rank else None)
        return found

    def _take(self, request: MeasuredRequest) -> None:
        self._began_s = self._began_s or request.began_s
        self._ended_s = request.began_s + request.wall_s
        for rank, reply in enumerate(request.ranks):
            busy_s, waited_s = self._by_rank.get(rank, (0.0, 0.0))
            if reply.ran is None or (reply.ran.regions is None and not busy_s):
                continue
            more_s, waits_s = busy_and_waiting(reply.ran)
            if reply.ran.regions is None:  # a step whose parts were not timed is taken to be as those before
                waits_s = waited_s / busy_s * more_s
            self._by_rank[rank] = busy_s + more_s, waited_s + min(more_s, waits_s)


def busy_and_waiting(ran: RankStep | RankRun) -> tuple[float, float]:
    """Seconds in which a rank was busy with a request and, of these, waited for others."""
    regions = ran.regions or {}
    if isinstance(ran, RankStep):
        return ran.step_s, sum(regions.get(name, 0.0) for name in WAITING)
    busy_s, waits_s = sum(ran.step_s), sum(sum(regions.get(name, ())) for name in WAITING)
    timed_s = busy_s if ran.timed_steps is None else sum(ran.step_s[step] for step in ran.timed_steps)
    return busy_s, waits_s * busy_s / timed_s if timed_s > 0 else 0.0  # the other steps are taken to be alike


def _fractions(spent: Mapping[str, float] | None) -> dict[str, float] | None:
    whole = 0.0 if spent is None else sum(spent.values())
    if spent is None or whole <= 0:
        return None
    return {part: round(spent[f"{part}_s"] / whole, 2) for part in PARTS}


LIVE = LiveTimes()  # the one of this process; never rebound
