"""How long the parts of a step take on one rank: named regions, by device events on a GPU, by the clock elsewhere.

A pair of events is recorded where the work is queued and read after the step's own synchronisation, so that measuring
waits for nothing. On the CPU, work is done when its call returns. A timer that is off hands out one region that does
nothing, for every name.
"""

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch

NOTHING: AbstractContextManager[None] = nullcontext()


class ClockRegion:
    """Seconds and entries of one name on the CPU. Not entered again before it is left."""

    __slots__ = ("began_s", "entries", "total_s")

    def __init__(self) -> None:
        self.began_s = self.total_s = 0.0
        self.entries = 0

    def __enter__(self) -> None:
        self.began_s = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.total_s += time.perf_counter() - self.began_s
        self.entries += 1

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
        self._began = self._mark()

    def __exit__(self, *error: object) -> None:
        self._pairs.append((self._began, self._mark()))

    @property
    def entries(self) -> int:
        """How often it was entered and left."""
        return len(self._pairs)

    def seconds(self) -> float:
        """Of all entries together. Waits for the last one's end, which a step has passed when it is asked."""
        if self._pairs:
            self._pairs[-1][1].synchronize()
        return sum(began.elapsed_time(ended) for began, ended in self._pairs) / 1000

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


class RegionTimer:
    """Times named regions of one step on one device; one that is not `on` measures nothing and costs nothing."""

    def __init__(self, device: torch.device, *, on: bool = True) -> None:
        self.device = device
        self.on = on
        self.regions: dict[str, ClockRegion | EventRegion] = {}
        self._laps: list[dict[str, ClockRegion | EventRegion]] = []

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
            clock.entries += 1

    def seconds(self) -> dict[str, float]:
        """Seconds by region, `NAME_s`. Call it once the device has finished the step; {} when the timer is off."""
        return _seconds(self.regions)

    def lap(self) -> None:
        """End a step of several: regions start anew. Waits for nothing."""
        self._laps.append(self.regions)
        self.regions = {}

    def laps(self) -> list[dict[str, float]]:
        """`seconds` of each lap, once the device has finished them."""
        return [_seconds(lap) for lap in self._laps]


def _seconds(regions: Mapping[str, ClockRegion | EventRegion]) -> dict[str, float]:
    return {f"{name}_s": region.seconds() for name, region in regions.items()}
