"""A Chrome trace of what one rank does: every operator and kernel, for chrome://tracing and ui.perfetto.dev.

Owns how torch's profiler is asked and its events are written: names, times and streams, and nothing of the machine.
Does not own when a request is traced (engine.py) nor where the trace goes (the parent).
"""

import gzip
import json
from collections.abc import Callable, Iterator

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

CPU_ROW, DEVICE_ROW = "operators", "kernels"


class Trace:
    """Runs something under the profiler once; `data` is gzipped JSON then."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank, self._device = rank, device
        self.data = b""

    def of(self, run: Callable[[], None]) -> None:
        """Run it, the device waited for, and keep its trace."""
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities) as profiler:
            run()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        text = json.dumps({"traceEvents": list(self._events(profiler))}, separators=(",", ":"))
        self.data = gzip.compress(text.encode("ascii"), mtime=0)

    def write_to(self, room: torch.Tensor, run: Callable[[], None]) -> int:
        """Run it; its trace goes to `room`, (bytes,), as far as that goes. Returns the trace's own length."""
        self.of(run)
        fitting = self.data[: room.numel()]
        room[: len(fitting)] = torch.frombuffer(bytearray(fitting), dtype=torch.uint8)
        return len(self.data)

    def _events(self, profiler: profile) -> Iterator[dict]:
        """Chrome's complete events (ph "X"), microseconds from the profiler's start; a process a rank."""
        yield {"name": "process_name", "ph": "M", "pid": self._rank, "args": {"name": f"rank {self._rank}"}}
        for event in profiler.events():
            kind = CPU_ROW if event.device_type == DeviceType.CPU else DEVICE_ROW
            span = event.time_range
            yield {
                "name": event.name,
                "cat": kind,
                "ph": "X",
                "ts": span.start,
                "dur": span.elapsed_us(),
                "pid": self._rank,
                "tid": f"{kind} {event.thread}",
            }
