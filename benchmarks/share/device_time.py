"""How long a device was busy, by torch's profiler: the union of what ran on all of its streams, and each kernel's part.

On a CPU an operation is done when its call returns, so the clock says the same.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

Interval = tuple[float, float]  # microseconds: when a kernel began, and when it ended


@dataclass(frozen=True)
class Busy:
    """Of one run: seconds in which the device did anything, the largest gap between, and seconds by kernel."""

    seconds: float
    largest_gap_s: float = 0.0
    kernels: dict[str, float] = field(default_factory=dict)

    def attention_kernel(self) -> str:
        """The kernel of attention that took the most, "" where none has a name that tells."""
        words = ("fmha", "flash", "attention", "cudnn_generated", "sdpa")
        named = {name: took for name, took in self.kernels.items() if any(word in name.lower() for word in words)}
        return max(named, key=lambda name: named[name], default="")


def busy_in(run: Callable[[], object], device: torch.device) -> Busy:
    """What the device did while `run` ran, all of it awaited."""
    activities = [torch.profiler.ProfilerActivity.CUDA] if device.type == "cuda" else []
    with torch.profiler.profile(activities=activities or [torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    kind = torch.autograd.DeviceType.CUDA if device.type == "cuda" else torch.autograd.DeviceType.CPU
    events = [event for event in profile.events() if event.device_type == kind]
    by_kernel: dict[str, float] = {}
    for event in events:
        took = (event.time_range.end - event.time_range.start) / 1e6
        by_kernel[event.name] = by_kernel.get(event.name, 0.0) + took
    seconds, gap = union_s([(event.time_range.start, event.time_range.end) for event in events])
    return Busy(seconds, gap, by_kernel)


def union_s(intervals: Iterable[Interval]) -> tuple[float, float]:
    """(seconds covered by any of the intervals, seconds of the largest gap between them), which are in microseconds."""
    covered = gap = 0.0
    end: float | None = None
    for start, stop in sorted(intervals):
        if end is None or start > end:
            gap = max(gap, 0.0 if end is None else start - end)
            covered += stop - start
            end = stop
        elif stop > end:
            covered += stop - end
            end = stop
    return covered / 1e6, gap / 1e6
