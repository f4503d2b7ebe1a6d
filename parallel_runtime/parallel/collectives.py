"""The collectives the strategies use, on one mesh axis, with every call and byte counted.

Owns the calls into torch.distributed, for activations and for weights, and the counting. Builds no group:
`worker/mesh.py` does.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from ..timing import RegionTimer

# torch 2.13 renamed it and warns of the old name.
_all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor


def _off() -> RegionTimer:
    return RegionTimer(torch.device("cpu"), on=False)


def _show_nothing(_: bool) -> None:
    """Stands for the control page where no parent watches: told that the rank waits, it does nothing."""


class Waiting:
    """Tells `show` that the rank waits, and times it, for as long as it is entered. Hundreds of them in a step."""

    __slots__ = ("_show", "_region")

    def __init__(self, show: Callable[[bool], None], region: AbstractContextManager[None]) -> None:
        self._show, self._region = show, region

    def __enter__(self) -> None:
        self._show(True)
        self._region.__enter__()

    def __exit__(self, *error: object) -> None:
        self._region.__exit__(None, None, None)
        self._show(False)


@dataclass
class Traffic:
    """What one rank sent to other ranks since `reset`; what it waits in collectives goes to a timer's `region`.

    `show_waiting` is called as the rank begins and ends to wait for others.
    """

    calls: int = 0
    num_bytes: int = 0
    region: str = "communication"
    timer: RegionTimer = field(default_factory=_off)
    show_waiting: Callable[[bool], None] = _show_nothing

    def reset(self, timer: RegionTimer | None = None) -> None:
        """Start counting anew, and time with `timer`, where there is one."""
        self.calls, self.num_bytes = 0, 0
        self.timer = timer or _off()

    def add(self, num_bytes: int) -> None:
        """Count one collective that sent `num_bytes` to others."""
        self.calls += 1
        self.num_bytes += num_bytes

    def waiting(self) -> "Waiting":
        """Around whatever keeps the rank, or the device's stream, until others have done their part."""
        return Waiting(self.show_waiting, self.timer.region(self.region))


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
    head_start_cycles: int = 0  # of choices.py

    def rank_at(self, index: int) -> int:
        """The global rank of a place on the axis, counted around it."""
        index %= self.size
        return index if self.group is None else dist.get_global_rank(self.group, index)

    def let_pass(self) -> None:
        """Let what was started last begin before what the current stream runs next, which is to hide it.

        Where both become ready at the same moment, an attention that takes all of a device's places until it ends is
        first: the exchange would begin behind it.
        """
        if self.head_start_cycles:
            torch.cuda._sleep(self.head_start_cycles)

    def all_to_all(
        self, send: torch.Tensor, *, send_lengths: tuple[int, ...], receive_lengths: tuple[int, ...]
    ) -> torch.Tensor:
        """Exchange runs of rows: `send` (sum(send_lengths), ...), contiguous; returns (sum(receive_lengths), ...)."""
        return AllToAll(self, send, send_lengths, receive_lengths, at_once=True).wait()

    def start_all_to_all(
        self, send: torch.Tensor, *, send_lengths: tuple[int, ...], receive_lengths: tuple[int, ...]
    ) -> "AllToAll":
        """Begin to exchange runs of rows, as `all_to_all`; `send` must be left alone until `AllToAll.wait`."""
        return AllToAll(self, send, send_lengths, receive_lengths)

    def maximum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The largest over all ranks of each number of `tensor`, which is contiguous; of the same shape and dtype."""
        with self.traffic.waiting():
            found = tensor.to("cpu" if self.staged else tensor.device, copy=True)
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.group)
            self.traffic.add((self.size - 1) * tensor.nbytes)
            return found.to(tensor.device)

    def start_shift(self, send: torch.Tensor, shape: tuple[int, ...]) -> "AllToAll":
        """Begin sending `send`, contiguous, to the next rank of the axis and receiving `shape` from the one before.

        As `start_all_to_all`: `send` must be left alone, and each rank of the axis takes part, whatever it has to send.
        Memory of single messages serves again only once the device is past them, and the host may be blocks ahead:
        ProcessGroupNCCL's pointToPoint calls recordStream, which a newer torch does of no collective.
        """

        def at(index: int, rows: int) -> tuple[int, ...]:
            return tuple(rows if place == index % self.size else 0 for place in range(self.size))

        return AllToAll(self, send, at(self.index + 1, send.shape[0]), at(self.index - 1, shape[0]), row=shape[1:])

    def all_gather(self, mine: torch.Tensor, whole: torch.Tensor) -> None:
        """Collect every rank's `mine` (n,) in `whole` (size * n,), as `start_all_gather`."""
        AllGather(self, mine, whole, at_once=True).wait()

    def start_all_gather(
        self, mine: torch.Tensor, whole: torch.Tensor, lengths: Sequence[int] | None = None
    ) -> "AllGather":
        """Begin collecting every rank's `mine` (n,) in `whole` (size * n,), in the order of the axis.

        Both are flat and contiguous and must be left alone until `AllGather.wait`. `lengths`: the n of every rank,
        where they differ. Bytes (uint8) go through every backend, where gloo refuses fp8.
        """
        return AllGather(self, mine, whole, lengths)


class AllToAll:
    """Each rank's rows for each other rank, on their way. `at_once`: the rank does nothing before it waits.

    A device then has the exchange on the stream that it computes on, where torch can, so no stream joins another.
    `row`: the shape of a row that arrives, by default as sent.
    """

    def __init__(
        self,
        axis: Axis,
        send: torch.Tensor,
        send_lengths: tuple[int, ...],
        receive_lengths: tuple[int, ...],
        *,
        at_once: bool = False,
        row: tuple[int, ...] | None = None,
    ) -> None:
        if axis.group is None:
            raise ValueError(f"axis {axis.name} of size {axis.size} has no group; exchange over an axis of two or more")
        self.axis, self.device = axis, send.device
        with axis.traffic.waiting():
            self.source = send.cpu() if axis.staged else send  # held here: it must outlive the transfer
            self.received = self.source.new_empty((sum(receive_lengths), *(send.shape[1:] if row is None else row)))
            options = dist.AllToAllOptions()
            if at_once and hasattr(options, "asyncOp"):
                options.asyncOp = False
            # Equal runs need no sizes. All ranks say so alike: one of other sizes would have some of these runs.
            equal = len({*send_lengths, *receive_lengths}) == 1 and send_lengths[0] > 0
            sizes = ([], []) if equal else (list(receive_lengths), list(send_lengths))
            # The group's own method: what torch.distributed puts around it takes a quarter of a small exchange.
            self.work = axis.group.alltoall_base(self.received, self.source, *sizes, options)
        row_bytes = send.element_size() * math.prod(send.shape[1:])
        axis.traffic.add((send.shape[0] - send_lengths[axis.index]) * row_bytes)

    def wait(self) -> torch.Tensor:
        """What arrived, rows of the ranks in their order, complete to whatever the current stream runs next."""
        with self.axis.traffic.waiting():
            if self.work is not None:  # on the stream that computes there is nothing to wait for
                self.work.wait()
            return self.received.to(self.device)


class AllGather:
    """One flat tensor, of which each rank has a part, on its way to all ranks; `at_once` as of `AllToAll`.

    gloo's own gather receives into memory of its own as large as the whole, and copies: messages straight to their
    places took half the time (40 MB from each of two ranks: 41 against 89 ms).
    """

    def __init__(
        self,
        axis: Axis,
        mine: torch.Tensor,
        whole: torch.Tensor,
        lengths: Sequence[int] | None = None,
        *,
        at_once: bool = False,
    ) -> None:
        self.axis, self.whole = axis, whole
        uneven = lengths is not None and len(set(lengths)) > 1
        with axis.traffic.waiting():
            self.source = mine.cpu() if axis.staged else mine  # held here: it must outlive the transfer
            self.target = torch.empty_like(whole, device="cpu") if axis.staged else whole
            if uneven or dist.get_backend(axis.group) == "gloo":
                self.works = self._exchange(lengths if uneven else None)
            else:
                work = _all_gather(self.target, self.source, group=axis.group, async_op=not at_once)
                self.works = [] if work is None else [work]
        axis.traffic.add((axis.size - 1) * mine.nbytes)

    def wait(self) -> None:
        """Return when `whole` is complete to whatever the current stream runs next. To wait again is free."""
        if not self.works:
            return
        with self.axis.traffic.waiting():
            for work in self.works:
                work.wait()  # once: gloo would take a second wait for a second message
            self.works = []
            if self.axis.staged:
                self.whole.copy_(self.target)

    def _exchange(self, lengths: Sequence[int] | None) -> list[dist.Work]:
        """Send this rank's part to every other, farther and farther along the axis, and receive theirs. What is empty
        is not sent."""
        size, index, group = self.axis.size, self.axis.index, self.axis.group
        parts = self.target.chunk(size) if lengths is None else self.target.split_with_sizes(list(lengths))
        messages = []
        for distance in range(1, size):
            to, source = (index + distance) % size, (index - distance) % size
            if self.source.numel():
                messages.append(dist.P2POp(dist.isend, self.source, self.axis.rank_at(to), group))
            if parts[source].numel():
                messages.append(dist.P2POp(dist.irecv, parts[source], self.axis.rank_at(source), group))
        works = dist.batch_isend_irecv(messages) if messages else []
        parts[index].copy_(self.source)
        return works
