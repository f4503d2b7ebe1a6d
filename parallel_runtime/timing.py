"""Time on one rank's device: when steps end, how long their parts take, and how far the host may run ahead.

Events are recorded where the work is queued and read once all is done, so that measuring waits for nothing and a step
may begin while the one before is under way. On the CPU, work is done when its call returns. A timer that is off hands
out one region that does nothing, for every name. An event costs the host some microseconds and a block has dozens, so
on a GPU a timer that is on is off in most steps.

On a GPU a block's kernels are only queued when its Python returns. A heartbeat given then says nothing of the device: a
step of minutes would be queued in a moment and silent after. So the host waits for the block `BLOCKS_AHEAD` before the
present one, and the heart beats when that is done; which also bounds what the queue holds in memory. On the CPU a block
is done when it returns.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate, pairwise

import torch

BLOCKS_AHEAD = 8  # a launch-bound block takes the host about a millisecond; more would only delay a cancel
NOTHING: AbstractContextManager[None] = nullcontext()


class ClockRegion:
    """Seconds of one name on the CPU. Not entered again before it is left."""

    __slots__ = ("began_s", "total_s")

    def __init__(self) -> None:
        self.began_s = self.total_s = 0.0

    def __enter__(self) -> None:
        self.began_s = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.total_s += time.perf_counter() - self.began_s

    def seconds(self) -> float:
        """Of all entries together."""
        return self.total_s


class EventRegion:
    """Pairs of events on the current stream of a CUDA device, for one name. Not entered again before it is left."""

    __slots__ = ("_device", "_pairs", "_began")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __enter__(self) -> None:
        self._began = _recorded(self._device)

    def __exit__(self, *error: object) -> None:
        self._pairs.append((self._began, _recorded(self._device)))

    def seconds(self) -> float:
        """Of all entries together. Waits for the last one's end, which a step has passed when it is asked."""
        if self._pairs:
            self._pairs[-1][1].synchronize()
        return sum(began.elapsed_time(ended) for began, ended in self._pairs) / 1000


class RegionTimer:
    """Times a request on one device: the moments that are marked and, if it is `on`, named regions of each lap.

    `asked`: it is on in some steps, one in `every`.
    """

    def __init__(self, device: torch.device, *, on: bool = True, every: int = 1) -> None:
        self.device = device
        self.on = self.asked = on
        self._every = every
        self.regions: dict[str, ClockRegion | EventRegion] = {}
        self._laps: list[dict[str, ClockRegion | EventRegion]] = []
        self._events: list[torch.cuda.Event] = []  # of all marks, on a GPU
        self._marked_s: list[float] = []  # on the machine's clock: of all marks, or of the first on a GPU

    def mark(self) -> None:
        """Note the moment at which the device is done with all that was queued so far, whether the timer is on or not.

        The first mark of a request waits for it, to look at both clocks at once, the others for nothing.
        """
        if self.device.type == "cuda":
            self._events.append(_recorded(self.device))
            if len(self._events) > 1:
                return
            self._events[0].synchronize()
        self._marked_s.append(time.perf_counter())

    def moments(self) -> list[float]:
        """What was marked, in order, in seconds on the machine's monotonic clock; waits for the device.

        Looks at both clocks again, as they drift apart.
        """
        if len(self._events) < 2:
            return list(self._marked_s)
        now, (first_s,) = _recorded(self.device), self._marked_s
        now.synchronize()
        passed_s = time.perf_counter() - first_s
        # From each to the next, since a difference has 24 bits.
        apart_s = [before.elapsed_time(after) / 1000 for before, after in pairwise([*self._events, now])]
        rate = passed_s / sum(apart_s)
        return [first_s + rate * done_s for done_s in accumulate(apart_s[:-1], initial=0.0)]

    def region(self, name: str) -> AbstractContextManager[None]:
        """What times what runs inside it. A name may be entered several times, not inside itself; its times add up."""
        if not self.on:
            return NOTHING
        region = self.regions.get(name)
        if region is None:
            cuda = self.device.type == "cuda"
            region = self.regions[name] = EventRegion(self.device) if cuda else ClockRegion()
        return region

    def spent(self, name: str, seconds: float) -> None:
        """Count seconds of the host's own time under a name that is no region of the device's."""
        if self.on:
            clock = self.regions.setdefault(name, ClockRegion())
            if not isinstance(clock, ClockRegion):
                raise ValueError(f"{name} is timed on the device; give the host's time another name")
            clock.total_s += seconds

    def seconds(self) -> dict[str, float]:
        """Seconds by region, `NAME_s`. Call it once the device has finished the step; {} when the timer is off."""
        return _seconds(self.regions)

    def enter_step(self, step: int, of: int) -> bool:
        """Be on in this step of `of`, or off; returns which."""
        self.on = self.asked and is_timed(step, of=of, every=self._every)
        return self.on

    def lap(self) -> None:
        """End a step of several: regions start anew. Waits for nothing."""
        self._laps.append(self.regions)
        self.regions = {}

    def laps(self) -> list[dict[str, float]]:
        """`seconds` of each lap, once the device has finished them."""
        return [_seconds(lap) for lap in self._laps]


def is_timed(step: int, *, of: int, every: int) -> bool:
    """Whether a step, of `of`, is one of those whose parts are timed: the second, and each `every`-th after it.

    The first makes room and connects, and is like no other; of a run of one step it is the one.
    """
    return step % every == min(1, of - 1, every - 1)


class LaunchThrottle:
    """Calls `beat` once for each block that the device has done."""

    def __init__(self, device: torch.device, beat: Callable[[], None]) -> None:
        self._device, self._beat = device, beat
        self._queued: deque[torch.cuda.Event] = deque()

    def block_queued(self) -> None:
        """All of a block is in the device's queue. Waits while more than `BLOCKS_AHEAD` are not done."""
        event = point_of(self._device)
        if event is None:
            self._beat()
            return
        self._queued.append(event)
        if len(self._queued) > BLOCKS_AHEAD:
            self._wait_for_oldest()

    def collect(self) -> None:
        """A beat for each block that is done by now. Waits for nothing."""
        while self._queued and self._queued[0].query():
            self._wait_for_oldest()

    def drain(self) -> None:
        """Wait for every block that is queued, a beat each."""
        while self._queued:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        self._queued.popleft().synchronize()
        self._beat()


def point_of(device: torch.device) -> torch.cuda.Event | None:
    """Where the current stream of a CUDA device ends now; None for a CPU, which is there already."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def wait_for(device: torch.device) -> None:
    """Return when a GPU has done what its current stream has so far; at once on the CPU."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def wait_for_all(device: torch.device) -> None:
    """Return when a GPU has done what any stream has, those of communicators too; at once on the CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _recorded(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _seconds(regions: Mapping[str, ClockRegion | EventRegion]) -> dict[str, float]:
    return {f"{name}_s": region.seconds() for name, region in regions.items()}
