"""A device that stands in for a GPU where events are concerned: work is queued, events say when it was done.

Follows what CUDA documents of its events: work queued on a stream runs in order, after the host has gone on; an event
recorded on it completes when the work before it is done; `elapsed_time` is in milliseconds with a float's 24 bits, and
an error while one of the two is not complete; `synchronize` waits. The device's clock runs `RATE` times as fast as the
host's. Owns no tensor: what a kernel would take is said in seconds.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

RATE = 1.01  # of the device's clock; true ones drift less


class Stream:
    """The one stream of the device."""

    def __init__(self) -> None:
        self.done_s = 0.0  # on the host's clock, when all that is queued will be done

    def run(self, seconds: float) -> None:
        """Queue work that takes so long; the host goes on at once."""
        self.done_s = max(self.done_s, time.perf_counter()) + seconds

    def synchronize(self) -> None:
        """Return when all is done."""
        _wait_until(self.done_s)


class Event:
    """As `torch.cuda.Event`, on a `Stream`."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._timed, self._at_s = enable_timing, -1.0

    def record(self, stream: Stream) -> None:
        """Complete when the stream gets here."""
        self._at_s = max(stream.done_s, time.perf_counter())

    def synchronize(self) -> None:
        """Return when it is complete."""
        _wait_until(self._at_s)

    def elapsed_time(self, end: "Event") -> float:
        """Milliseconds from this event to `end`, on the device's clock."""
        if not (self._timed and end._timed):
            raise RuntimeError("both events need enable_timing=True")
        if max(self._at_s, end._at_s) > time.perf_counter():
            raise RuntimeError("device not ready: an event is not complete")
        return torch.tensor((end._at_s - self._at_s) * RATE * 1000, dtype=torch.float32).item()


def _wait_until(moment_s: float) -> None:
    while time.perf_counter() < moment_s:
        time.sleep(1e-4)


@contextmanager
def pretended_cuda() -> Iterator[Stream]:
    """`torch.cuda`'s events and current stream are this device's meanwhile."""
    stream = Stream()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.cuda, "Event", Event)
        patched.setattr(torch.cuda, "current_stream", lambda device=None: stream)
        patched.setattr(torch.cuda, "synchronize", lambda device=None: stream.synchronize())
        yield stream
