"""Messages between neighbouring stages of a pipeline.

Owns what is in flight and the memory it needs. Sends return at once and are kept until they are through. Two rules of a
GPU decide the rest:

- The operations of one communicator run in the order in which they were issued, sends behind receives. So every
  `P2PChannel` is one direction between two ranks, with a group of its own: a send that another rank waits for never
  queues behind a receive that waits for that rank.
- CUDA loads a kernel when it is first launched, and the launch waits until the device is idle (CUDA C++ programming
  guide, "Lazy Loading: Potential Hazards"); cudaFree does the same. So a receive is posted only when all that its
  message depends on has been queued here, `Expected.after`, and no later: whoever sends it may be at such a launch.

NCCL connects two ranks with their first message, for which the hosts of both wait. So on a circle of links some rank
receives before it sends.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .collectives import Traffic


@dataclass(frozen=True, kw_only=True)
class P2PChannel:
    """One direction between this rank and `peer`, a global rank, in a group of those two that nothing else uses.

    `staged`: the tensors travel through host memory.
    """

    peer: int
    group: dist.ProcessGroup
    traffic: Traffic
    staged: bool = False


@dataclass(frozen=True)
class Expected:
    """A message to come: in which call of the model it is needed, and what it is.

    `after`: how many messages must have been worked on, and their results sent, before this one is received.
    """

    call: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    after: int


class Outbox:
    """Sends over a link. At most `depth` messages are in flight; those before are long received."""

    def __init__(self, link: P2PChannel, *, depth: int) -> None:
        self._link, self._depth = link, depth
        self._in_flight: deque[tuple[dist.Work, torch.Tensor]] = deque()

    def send(self, tensor: torch.Tensor) -> None:
        """Begin sending; the tensor must be left alone. One without elements is not sent."""
        if not tensor.numel():
            return
        if len(self._in_flight) >= self._depth:
            self._finish_oldest()
        source = (tensor.cpu() if self._link.staged else tensor).contiguous()
        work = dist.isend(source, self._link.peer, group=self._link.group)
        if work is None:
            raise RuntimeError(f"rank {dist.get_rank()} is not in the group of its link to rank {self._link.peer}")
        self._in_flight.append((work, source))
        self._link.traffic.add(source.nbytes)

    def drain(self) -> None:
        """Return when all is sent."""
        while self._in_flight:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        work, _ = self._in_flight.popleft()
        with self._link.traffic.waiting():
            work.wait()


class Inbox:
    """Receives over a link what is `expected`, in that order; None for what nobody knows yet, to be asked for again.

    `may_post(call)`: whether that call is sure to be run, so that its message is sure to come.
    """

    def __init__(
        self,
        link: P2PChannel,
        *,
        expected: Iterator[Expected | None],
        may_post: Callable[[int], bool],
        device: torch.device,
    ) -> None:
        self._link, self._expected, self._may_post, self._device = link, expected, may_post, device
        self._next: Expected | None = None
        self._posted: deque[tuple[dist.Work | None, torch.Tensor]] = deque()
        self._worked_on = 0

    def take(self) -> torch.Tensor:
        """The next message, complete to whatever the current stream runs next."""
        if not self._posted:
            self._post()
        return self._finish_oldest().to(self._device)

    def drain(self) -> None:
        """Return when all that was posted has come: of a run that ends early, messages that nobody takes."""
        while self._posted:
            self._finish_oldest()

    def worked_on(self) -> None:
        """Say that the work on the message taken last is queued and its result sent. Posts what may now be received."""
        self._worked_on += 1
        while (due := self._due()) is not None and due.after <= self._worked_on and self._may_post(due.call):
            self._post()

    def _due(self) -> Expected | None:
        if self._next is None:
            self._next = next(self._expected, None)
        return self._next

    def _finish_oldest(self) -> torch.Tensor:
        work, tensor = self._posted.popleft()
        if work is not None:
            with self._link.traffic.waiting():
                work.wait()
        return tensor

    def _post(self) -> None:
        due = self._due()
        if due is None:
            raise RuntimeError("no further message is expected")
        device = torch.device("cpu") if self._link.staged else self._device
        tensor = torch.empty(due.shape, dtype=due.dtype, device=device)
        self._next = None
        work = dist.irecv(tensor, self._link.peer, group=self._link.group) if tensor.numel() else None
        self._posted.append((work, tensor))
