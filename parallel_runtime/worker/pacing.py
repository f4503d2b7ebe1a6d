"""How far the host may run ahead of its device, and with what a rank's heart beats: blocks that are done.

On a GPU a block's kernels are only queued when its Python returns. A heartbeat given then says nothing of the device: a
step of minutes would be queued in a moment and silent after. So the host waits for the block `BLOCKS_AHEAD` before the
present one, and the heart beats when that is done; which also bounds what the queue holds in memory. On the CPU a block
is done when it returns.
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

BLOCKS_AHEAD = 8  # a launch-bound block takes the host about a millisecond; more would only delay a cancel


class Event(Protocol):
    """A point in a device's queue, as `torch.cuda.Event`."""

    def synchronize(self) -> None:
        """Return when the device is there."""
        ...

    def query(self) -> bool:
        """Whether the device is there."""
        ...


class Pace:
    """Calls `beat` once for each block that the device has done."""

    def __init__(self, device: torch.device, beat: Callable[[], None]) -> None:
        self._device, self._beat = device, beat
        self._queued: deque[Event] = deque()

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


def point_of(device: torch.device) -> Event | None:
    """Where the current stream of a CUDA device ends now; None for a CPU, which is there already."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event
