"""Messages from each place of an axis to the next, or from its last place to its first.

Owns what is in flight and the memory it needs. Sends return at once and are kept until they are through; a receive is
posted before its message is needed, so that it arrives while something else is computed. Each direction has a group of
its own: with two ranks on one NCCL communicator, a send would wait behind the receive that waits for its answer.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .collectives import Axis


@dataclass(frozen=True)
class Expected:
    """A message to come: in which call of the model it is needed, and what it is."""

    call: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class Outbox:
    """Sends to place `to` of an axis. At most `depth` messages are in flight; those before are long received."""

    def __init__(self, axis: Axis, *, to: int, depth: int) -> None:
        self._axis, self._to, self._depth = axis, to, depth
        self._in_flight: deque[tuple[dist.Work, torch.Tensor]] = deque()

    def send(self, tensor: torch.Tensor) -> None:
        """Begin sending; the tensor must be left alone. One without elements is not sent."""
        if not tensor.numel():
            return
        if len(self._in_flight) >= self._depth:
            self._finish_oldest()
        source = (tensor.cpu() if self._axis.staged else tensor).contiguous()
        work = dist.isend(source, _rank(self._axis, self._to), group=self._axis.group)
        if work is None:
            raise RuntimeError(f"rank {dist.get_rank()} is not in the group of axis {self._axis.name}")
        self._in_flight.append((work, source))
        self._axis.traffic.add(source.nbytes)

    def drain(self) -> None:
        """Return when all is sent."""
        while self._in_flight:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        work, _ = self._in_flight.popleft()
        with self._axis.traffic.waiting():
            work.wait()


class Inbox:
    """Receives from place `source` of an axis what is `expected`, one message ahead.

    `may_post(call)`: whether that call is sure to be run, so that its message is sure to come.
    """

    def __init__(
        self,
        axis: Axis,
        *,
        source: int,
        expected: Iterator[Expected],
        may_post: Callable[[int], bool],
        device: torch.device,
    ) -> None:
        self._axis, self._source, self._expected, self._may_post = axis, source, expected, may_post
        self._device = device
        self._next = next(expected, None)
        self._posted: tuple[dist.Work | None, torch.Tensor] | None = None

    def take(self) -> torch.Tensor:
        """The next message, complete to whatever the current stream runs next; the one after it is posted."""
        work, tensor = self._posted or self._post()
        if work is not None:
            with self._axis.traffic.waiting():
                work.wait()
        self._posted = None
        if self._next is not None and self._may_post(self._next.call):
            self._posted = self._post()
        return tensor.to(self._device)

    def _post(self) -> tuple[dist.Work | None, torch.Tensor]:
        if self._next is None:
            raise RuntimeError("no further message is expected")
        device = torch.device("cpu") if self._axis.staged else self._device
        tensor = torch.empty(self._next.shape, dtype=self._next.dtype, device=device)
        self._next = next(self._expected, None)
        if not tensor.numel():
            return None, tensor
        return dist.irecv(tensor, _rank(self._axis, self._source), group=self._axis.group), tensor


def _rank(axis: Axis, index: int) -> int:
    """The world's number of a place on the axis."""
    if axis.group is None:
        raise ValueError(f"axis {axis.name} of size {axis.size} has no group; send over an axis of two or more")
    return dist.get_global_rank(axis.group, index)
