"""Where a rank's time goes while a run in the workers is under way, for the panel.

Owns the sums of the steps that have ended. They are for the eye: the report's times are the loop's own
(worker_loop.py). Measures nothing anew and waits for nothing: on a GPU a step counts once the device has ended
it, and ended when that is seen.
"""

import time
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import torch

from ..timing import ClockRegion, EventRegion, point_of
from ..wire.replies import WAITING, TimeSpent


class _Queued(NamedTuple):
    """A step whose work is in the device's queue: its end there, what was timed, and the permit that it waited for."""

    end: torch.cuda.Event | None
    regions: Mapping[str, ClockRegion | EventRegion]
    permit_s: float
    waited_s: float


class RankTimes:
    """The time of one rank in one run, step by step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._queued: deque[_Queued] = deque()
        self._compute_s = self._communication_s = self._idle_s = 0.0
        self._before_s = time.perf_counter()
        self._waiting = 0.0  # the share of the last timed step in which it waited, and so of those after it

    def begin(self) -> None:
        """The first step begins."""
        self._before_s = time.perf_counter()

    def step(self, regions: Mapping[str, ClockRegion | EventRegion], *, permit_s: float, waited_s: float) -> None:
        """All of a step is in the device's queue; it had waited `waited_s` until it got its permit at `permit_s`."""
        self._queued.append(_Queued(point_of(self._device), regions, permit_s, waited_s))

    def spent(self) -> TimeSpent:
        """What the steps that have ended took."""
        while self._queued and ((end := self._queued[0].end) is None or end.query()):
            self._count(self._queued.popleft(), time.perf_counter())
        return TimeSpent(
            compute_s=round(self._compute_s, 4),
            communication_s=round(self._communication_s, 4),
            idle_s=round(self._idle_s, 4),
        )

    def _count(self, step: _Queued, now_s: float) -> None:
        idle_s = min(step.waited_s, max(0.0, step.permit_s - self._before_s))
        busy_s = max(0.0, now_s - self._before_s - idle_s)
        if step.regions and busy_s > 0:
            waits_s = sum(region.seconds() for name, region in step.regions.items() if f"{name}_s" in WAITING)
            self._waiting = min(1.0, waits_s / busy_s)
        waited_s = self._waiting * busy_s
        self._communication_s += waited_s
        self._compute_s += busy_s - waited_s
        self._idle_s += idle_s
        self._before_s = now_s
