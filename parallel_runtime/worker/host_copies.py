"""Copies of a device's tensors to shared memory for which no work on the device waits: previews.

A plain copy from a GPU stops the host until the device is there, and so until all that was queued before is done: what
other ranks wait for would be queued late. Here a copy goes to pinned memory on another stream than the computing one,
and from there to its place when it has arrived. On the CPU it is a plain copy, done at once.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..pinned import SideStream
from ..sampler_recurrence import PREVIEW_SLOTS


@dataclass(frozen=True)
class _Pending:
    """A copy under way. `rows` is held here: its memory must not serve another tensor before it has been read."""

    arrival: torch.cuda.Event
    pinned: torch.Tensor
    rows: torch.Tensor
    target: torch.Tensor


class HostCopies:
    """The copies of one run, in the order in which they were started."""

    def __init__(self, device: torch.device) -> None:
        self._side_stream = SideStream(device) if device.type == "cuda" else None
        self._free: dict[torch.Size, list[torch.Tensor]] = {}
        self._pending: deque[_Pending | Callable[[], None]] = deque()

    def reserve(self, shape: torch.Size) -> None:
        """Have pinned memory for previews of that shape. Before the first call: pinning waits for the device."""
        if self._side_stream is not None:
            self._free.setdefault(shape, []).extend(self._side_stream.pinned(shape) for _ in range(PREVIEW_SLOTS))

    def start(self, target: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy `rows`, fp32 and left alone from now on, to `target` on the host."""
        if self._side_stream is None:
            target.copy_(rows)
            return
        free = self._free.setdefault(rows.shape, [])
        pinned = free.pop() if free else self._side_stream.pinned(rows.shape)
        self._pending.append(_Pending(self._side_stream.start(pinned, rows), pinned, rows, target))

    def then(self, tell: Callable[[], None]) -> None:
        """Call `tell` once all copies that were started before are in place: at once where they are."""
        self._pending.append(tell)
        self.collect()

    def collect(self) -> None:
        """Put in place what has arrived, and call what waits for it. Waits for nothing."""
        while self._pending:
            first = self._pending[0]
            if isinstance(first, _Pending) and not first.arrival.query():
                return
            self._pending.popleft()
            self._complete(first)

    def drain(self) -> None:
        """Wait for all of them."""
        while self._pending:
            first = self._pending.popleft()
            if isinstance(first, _Pending):
                first.arrival.synchronize()
            self._complete(first)

    def _complete(self, first: _Pending | Callable[[], None]) -> None:
        if not isinstance(first, _Pending):
            first()
            return
        first.target.copy_(first.pinned)
        self._free[first.pinned.shape].append(first.pinned)
