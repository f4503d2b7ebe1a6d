"""The collectives the strategies use, on one mesh axis, with every call and byte counted.

Owns the calls into torch.distributed for activations and the counting. Builds no group: `rank/mesh.py` does.
"""

import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from yunchang.ring.utils import RingComm


@dataclass
class Traffic:
    """What one rank sent to other ranks since `reset`."""

    calls: int = 0
    num_bytes: int = 0
    seconds: float = 0.0

    def reset(self) -> None:
        """Start counting anew."""
        self.calls, self.num_bytes, self.seconds = 0, 0, 0.0

    def add(self, num_bytes: int, seconds: float) -> None:
        """Count one collective that sent `num_bytes` to others and kept the host for `seconds`."""
        self.calls += 1
        self.num_bytes += num_bytes
        self.seconds += seconds


@dataclass
class Axis:
    """One axis of the mesh as a rank sees it: a process group, its size and this rank's place in it."""

    name: str
    size: int = 1
    index: int = 0
    group: dist.ProcessGroup | None = None
    traffic: Traffic = field(default_factory=Traffic)
    # gloo has no all-to-all for device memory; two ranks on one device talk through it, so their tensors are staged.
    staged: bool = False

    def all_to_all(
        self, send: torch.Tensor, *, send_lengths: tuple[int, ...], receive_lengths: tuple[int, ...]
    ) -> torch.Tensor:
        """Exchange runs of rows: `send` (sum(send_lengths), ...), contiguous; returns (sum(receive_lengths), ...)."""
        began = time.perf_counter()
        source = send.cpu() if self.staged else send
        received = source.new_empty((sum(receive_lengths), *send.shape[1:]))
        dist.all_to_all_single(received, source, list(receive_lengths), list(send_lengths), group=self.group)
        result = received.to(send.device) if self.staged else received
        kept = send_lengths[self.index]
        row_bytes = send.element_size() * (send[0].numel() if send.shape[0] else 0)
        self.traffic.add((send.shape[0] - kept) * row_bytes, time.perf_counter() - began)
        return result

    def start_shift(self, send: torch.Tensor, receive: torch.Tensor) -> "Shift":
        """Begin sending `send` to the next rank of the axis and receiving `receive` from the one before.

        The shapes may differ; both tensors must be left alone until `Shift.wait`.
        """
        return Shift(self, send, receive)


class Shift:
    """One hop around the ring, in flight. Receive buffers are explicit: neighbours' lengths may differ."""

    def __init__(self, axis: Axis, send: torch.Tensor, receive: torch.Tensor) -> None:
        began = time.perf_counter()
        self.axis, self.receive = axis, receive
        self.source = send.cpu() if axis.staged else send
        self.target = torch.empty_like(receive, device="cpu") if axis.staged else receive
        self.ring = RingComm(axis.group)
        self.ring.send_recv(self.source, self.target)
        self.ring.commit()
        axis.traffic.add(send.numel() * send.element_size(), time.perf_counter() - began)

    def wait(self) -> None:
        """Return when the received rows are in place."""
        began = time.perf_counter()
        self.ring.wait()
        if self.axis.staged:
            self.receive.copy_(self.target)
        self.axis.traffic.seconds += time.perf_counter() - began
