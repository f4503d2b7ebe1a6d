"""Exchanges of one rank of several, in one process: what would arrive is a local copy of as many bytes.

Owns the axis to nobody and, where a link is named, the moment at which that link would have delivered. Lengths, heads
and copies before and after an exchange are those of the rank; so are the bytes that its traffic counts.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from parallel_runtime.parallel.attention import SequenceParallelAttention
from parallel_runtime.parallel.collectives import Axis, Traffic
from parallel_runtime.parallel.overlap import SharedHeads, possible_chunks
from parallel_runtime.planner.hardware import Interconnect

# A message is one kernel, as NCCL's is: it has its places on the device from its start to its end. How many places
# NCCL's has is not known. It counts nanoseconds: 10 million cycles took 5 to 15 ms on one device.
MESSAGE = r"""
extern "C" __global__ void message(int us) {
  unsigned long long began, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(began));
  do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - began < 1000ull * us);
}
"""
PLACES, THREADS = 16, 512  # of such a kernel


@dataclass
class Delivery:
    """When bytes are there: at once, or as `link` delivers them, one message after another.

    On a CPU `wait` sleeps; on a GPU a kernel on a stream of its own runs as long, and the current stream waits for it.
    """

    device: torch.device
    link: Interconnect | None = None
    ranks: int = 2
    busy_until_s: float = 0.0
    stream: "torch.cuda.Stream | None" = None
    message: Callable[..., None] | None = None

    def __post_init__(self) -> None:
        """A stream with priority over the one that computes, as NCCL's has in a rank."""
        if self.device.type != "cuda":
            return
        self.stream = torch.cuda.Stream(self.device, priority=-1)
        if self.link is not None:
            self.message = message_kernel()

    def seconds(self, num_bytes: int, *, to_all: bool) -> float:
        """How long the link takes for one message."""
        if self.link is None:
            return 0.0
        rate = self.link.all_to_all_bandwidth(self.ranks) if to_all else self.link.bandwidth
        return num_bytes / rate + self.link.latency_s

    def start(self, target: torch.Tensor, source: torch.Tensor, num_bytes: int, *, to_all: bool) -> "Arrival":
        """Fill `target` with the numbers of `source`; `num_bytes` are those that go to other ranks."""
        seconds = self.seconds(num_bytes, to_all=to_all)
        if self.stream is None:
            fill(target, source)
            self.busy_until_s = max(time.perf_counter(), self.busy_until_s) + seconds
            return Arrival(target, source, due_s=self.busy_until_s)
        fill(target, source)  # before, over each link and over none: behind attention it would wait for its end
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            if self.message is not None:
                self.message(grid=(PLACES, 1, 1), block=(THREADS, 1, 1), args=[int(1e6 * seconds)])
            done = torch.cuda.Event()
            done.record(self.stream)
        return Arrival(target, source, done=done)


@dataclass
class Arrival:
    """A message under way; `source` lives until it is there."""

    target: torch.Tensor
    source: torch.Tensor | None
    due_s: float = 0.0
    done: "torch.cuda.Event | None" = None
    traffic: Traffic = field(default_factory=Traffic)

    def wait(self) -> torch.Tensor:
        """What arrived, complete to whatever the current stream runs next."""
        if self.source is None:
            return self.target
        with self.traffic.waiting():
            if self.done is not None:
                torch.cuda.current_stream(self.target.device).wait_event(self.done)
            elif (left := self.due_s - time.perf_counter()) > 0:
                time.sleep(left)
        self.source = None
        return self.target


@dataclass
class LocalAxis(Axis):
    """An axis whose other ranks are not there. Counts as `Axis` does."""

    delivery: Delivery | None = None

    def rank_at(self, index: int) -> int:
        """As `Axis.rank_at`."""
        return index % self.size

    def all_to_all(
        self, send: torch.Tensor, *, send_lengths: tuple[int, ...], receive_lengths: tuple[int, ...]
    ) -> torch.Tensor:
        """As `Axis.all_to_all`."""
        return self.start_all_to_all(send, send_lengths=send_lengths, receive_lengths=receive_lengths).wait()

    def start_all_to_all(  # type: ignore[override]
        self, send: torch.Tensor, *, send_lengths: tuple[int, ...], receive_lengths: tuple[int, ...]
    ) -> Arrival:
        """As `Axis.start_all_to_all`."""
        row_bytes = send.element_size() * math.prod(send.shape[1:])
        received = send.new_empty((sum(receive_lengths), *send.shape[1:]))
        # What this rank sends to itself is laid out as what others would send it: their tokens look like its own.
        own = send.narrow(0, sum(send_lengths[: self.index]), send_lengths[self.index])
        return self._start(received, own, (send.shape[0] - own.shape[0]) * row_bytes, to_all=True)

    def start_shift(self, send: torch.Tensor, shape: tuple[int, ...]) -> Arrival:  # type: ignore[override]
        """As `Axis.start_shift`."""
        return self._start(send.new_empty(shape), send, send.nbytes, to_all=False)

    def all_gather(self, mine: torch.Tensor, whole: torch.Tensor) -> None:
        """As `Axis.all_gather`."""
        self.start_all_gather(mine, whole).wait()

    def start_all_gather(  # type: ignore[override]
        self, mine: torch.Tensor, whole: torch.Tensor, lengths: object = None
    ) -> Arrival:
        """As `Axis.start_all_gather`."""
        return self._start(whole, mine, (self.size - 1) * mine.nbytes, to_all=False)

    def _start(self, target: torch.Tensor, source: torch.Tensor, num_bytes: int, *, to_all: bool) -> Arrival:
        self.traffic.add(num_bytes)
        if self.delivery is None:
            self.delivery = Delivery(source.device, ranks=self.size)
        arrival = self.delivery.start(target, source, num_bytes, to_all=to_all)
        arrival.traffic = self.traffic
        return arrival


def local_sequence(
    *,
    ulysses: int = 1,
    ring: int = 1,
    index: int = 0,
    device: torch.device,
    link: Interconnect | None = None,
    chunks: int = 1,
    head_start_cycles: int = 0,
) -> SequenceParallelAttention:
    """The part `index` of ulysses * ring ranks, whose exchanges are local; traffic of all axes is counted as one.

    `link`: exchanges take as long as over this one. `chunks`: heads go in so many at most. `head_start_cycles`: of
    choices.py.
    """
    traffic, delivery = Traffic(), Delivery(device, link, max(ulysses, ring))
    axes = {
        name: LocalAxis(name, size, place, None, traffic, head_start_cycles=head_start_cycles, delivery=delivery)
        for name, size, place in (
            ("ring", ring, index // ulysses),
            ("ulysses", ulysses, index % ulysses),
            ("sequence", ring * ulysses, index),
        )
    }
    sequence = SequenceParallelAttention(ring=axes["ring"], ulysses=axes["ulysses"], whole=axes["sequence"])
    if chunks > 1:
        sequence.chunks = lambda heads: at_most(heads, chunks)
    return sequence


def at_most(heads: SharedHeads, chunks: int) -> int:
    """The largest number of chunks up to this one in which each rank has heads."""
    return max(each for each in possible_chunks(heads.groups, heads.ranks) if each <= max(1, chunks))


def fill(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy `source` into `target` along its first dimension, again from the start where the target is longer."""
    target, source = (each.view(-1) if each.is_contiguous() else each.reshape(-1) for each in (target, source))
    if not source.numel():
        target.zero_()
        return
    for start in range(0, target.numel(), source.numel()):
        part = target[start : start + source.numel()]
        part.copy_(source[: part.numel()])


def message_kernel() -> Callable[..., None]:
    """MESSAGE, compiled. Raises `ValueError` where torch cannot."""
    compiler = getattr(torch.cuda, "_compile_kernel", None)
    if compiler is None:
        raise ValueError(f"torch {torch.__version__} cannot compile a kernel of its own, and a link needs one; 2.9 can")
    kernel: Callable[..., None] = compiler(MESSAGE, "message")
    return kernel
