"""Messages between neighbouring stages of a pipeline.

Owns what is in flight and the memory it needs. Sends return at once and are kept until they are through. Two rules of a
GPU decide the rest:

- The operations of one communicator run in the order in which they were issued, sends behind receives. So every
  `P2PChannel` is one direction between two ranks, with a group of its own: a send that another rank waits for never
  queues behind a receive that waits for that rank.
- CUDA loads a kernel when it is first launched, and the launch waits until the device is idle (CUDA C++ programming
  guide, "Lazy Loading: Potential Hazards"); cudaFree does the same. The device is idle when its messages are through:
  a receive when the sender's host has queued what it depends on, a send when the receiver's host has posted it. So a
  receive is posted only when all that its message depends on has been queued here, and before any launch here that may
  wait for the sender. Memory that it lands in may have to be asked of the device, which is such a launch.

NCCL connects two ranks with their first message, for which the hosts of both wait. So on a circle of links some rank
receives before it sends.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .collectives import Traffic


@dataclass(frozen=True)
class PendingReceive:
    """A message whose receive is posted. `tensor` is where it lands, for `device`."""

    tensor: torch.Tensor
    work: dist.Work | None
    device: torch.device
    traffic: Traffic

    def wait(self) -> torch.Tensor:
        """The message on `device`, complete to whatever the current stream runs next. Once."""
        if self.work is not None:
            with self.traffic.waiting():
                self.work.wait()
        return self.tensor.to(self.device)


class P2PChannel:
    """One direction between this rank and `peer`, a global rank, in a group of those two that nothing else uses.

    `staged`: the tensors travel through host memory. At most `depth` messages are in flight; those before are long
    received.
    """

    def __init__(
        self, *, peer: int, group: dist.ProcessGroup, traffic: Traffic, depth: int, staged: bool = False
    ) -> None:
        self.peer, self.group = peer, group
        self._traffic, self._depth, self._staged = traffic, depth, staged
        self._in_flight: deque[tuple[dist.Work, torch.Tensor]] = deque()

    def send(self, tensor: torch.Tensor) -> None:
        """Begin sending; the tensor must be left alone. One without elements is not sent."""
        if not tensor.numel():
            return
        if len(self._in_flight) >= self._depth:
            self._finish_oldest()
        source = (tensor.cpu() if self._staged else tensor).contiguous()
        work = dist.isend(source, self.peer, group=self.group)
        if work is None:
            raise RuntimeError(f"rank {dist.get_rank()} is not in the group of its link to rank {self.peer}")
        self._in_flight.append((work, source))
        self._traffic.add(source.nbytes)

    def post(self, landing: torch.Tensor) -> "PendingReceive":
        """Post the receive of the next message, which lands there; one without elements is not sent."""
        tensor, work = torch.empty_like(landing, device="cpu") if self._staged else landing, None
        if tensor.numel():
            work = dist.irecv(tensor, self.peer, group=self.group)
            if work is None:
                raise RuntimeError(f"rank {dist.get_rank()} is not in the group of its link from rank {self.peer}")
        return PendingReceive(tensor, work, landing.device, self._traffic)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, *, device: torch.device) -> torch.Tensor:
        """The next message, as `PendingReceive.wait` returns it."""
        return self.post(torch.empty(shape, dtype=dtype, device=device)).wait()

    def drain(self) -> None:
        """Return when all is sent."""
        while self._in_flight:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        work, _ = self._in_flight.popleft()
        with self._traffic.waiting():
            work.wait()
