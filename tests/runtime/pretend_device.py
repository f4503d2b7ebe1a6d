"""A device that stands in for a GPU where events are concerned, and a clock on which its work takes an exact time.

Follows what CUDA documents of its events: work queued on a stream runs in order, after the host has gone on; an event
recorded on it completes when the work before it is done; `elapsed_time` is in milliseconds with a float's 24 bits, and
an error while one of the two is not complete; `synchronize` waits. The device's clock runs `RATE` times as fast as the
host's. The host's is `time.perf_counter` meanwhile: it goes on by a microsecond each time it is looked at, and by what
is waited, so nothing depends on the machine. Owns no tensor: what a kernel would take is said in seconds.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

RATE = 1.01  # of the device's clock; true ones drift less
LOOK_S = 1e-6


class Stream:
    """The one stream of the device. `waits` counts how often the host waited for it."""

    def __init__(self) -> None:
        self.now_s = 1000.0  # on the host's clock
        self.done_s = 0.0  # when all that is queued will be done
        self.waits = 0

    def look(self) -> float:
        """The time on the host's clock."""
        self.now_s += LOOK_S
        return self.now_s

    def run(self, seconds: float) -> None:
        """Queue work that takes so long; the host goes on at once."""
        self.done_s = max(self.done_s, self.look()) + seconds

    def synchronize(self) -> None:
        """Return when all is done."""
        self.wait_until(self.done_s)

    def wait_until(self, moment_s: float) -> None:
        """Have the host wait."""
        self.waits += moment_s > self.now_s
        self.now_s = max(self.now_s, moment_s)


class Event:
    """As `torch.cuda.Event`, on a `Stream`."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._timed = enable_timing

    def record(self, stream: Stream) -> None:
        """Complete when the stream gets here."""
        self._stream, self._at_s = stream, max(stream.done_s, stream.look())

    def synchronize(self) -> None:
        """Return when it is complete."""
        self._stream.wait_until(self._at_s)

    def query(self) -> bool:
        """Whether it is complete."""
        return self._at_s <= self._stream.look()

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds from this event to `end`, on the device's clock."""
        if not (self._timed and end._timed):
            raise RuntimeError("both events need enable_timing=True")
        if max(self._at_s, end._at_s) > self._stream.now_s:
            raise RuntimeError("device not ready: an event is not complete")
        return torch.tensor((end._at_s - self._at_s) * RATE * 1000, dtype=torch.float32).item()


@contextmanager
def pretended_cuda() -> Iterator[Stream]:
    """`torch.cuda`'s events and current stream are this device's meanwhile, and the host's clock is exact."""
    stream = Stream()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.cuda, "Event", Event)
        patched.setattr(torch.cuda, "current_stream", lambda device=None: stream)
        patched.setattr(torch.cuda, "synchronize", lambda device=None: stream.synchronize())
        patched.setattr(time, "perf_counter", stream.look)
        yield stream
