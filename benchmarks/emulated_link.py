"""An axis whose bytes are there at once, and are waited for until a named link would have delivered them.

Ranks of two processes write into each other's shared memory (`Mailboxes`); a rank alone is sent what it sends itself.
A transfer begins when both ranks have started it and the link has carried those before it; it takes the link's latency
and its bytes over the link's bandwidth. Waiting takes no core.

Three clocks: of a simulation, where attention takes what it is said to take; of the rank's thread, its CPU time and
what it has waited, which other programs do not lengthen; and the wall's.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch

from parallel_runtime.parallel.collectives import Axis

SLOTS = 16  # exchanges after which a place in shared memory is used again
LOOK_S = 1e-4  # how often a rank looks whether the other one has started


class SimulatedClock:
    """Stands still but for what it is told."""

    def __init__(self) -> None:
        self.computed_s = self.waited_s = 0.0

    def now(self) -> float:
        """Seconds since the beginning."""
        return self.computed_s + self.waited_s

    def sleep_until(self, moment: float) -> None:
        """The rest of the time is waited."""
        self.waited_s += max(0.0, moment - self.now())

    def spend(self, seconds: float) -> None:
        """So much is computed."""
        self.computed_s += seconds


class ThreadClock(SimulatedClock):
    """CPU time of this thread, and beside it what was waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.began = time.thread_time()

    def now(self) -> float:
        """Seconds computed and waited since the clock was made."""
        return time.thread_time() - self.began + self.waited_s


class WallClock(SimulatedClock):
    """The machine's, which its processes share."""

    def now(self) -> float:
        """Seconds of the machine's monotonic clock."""
        return time.monotonic()

    def sleep_until(self, moment: float) -> None:
        """Sleep."""
        rest_s = max(0.0, moment - time.monotonic())
        self.waited_s += rest_s
        time.sleep(rest_s)


class Mailboxes:
    """Where two ranks, forked after it was made, put what they send each other; `numbers` floats a message at most."""

    def __init__(self, numbers: int) -> None:
        self.numbers = numbers
        self.data = torch.empty(2, SLOTS, 2 * numbers).share_memory_()  # of each receiver
        self.started = torch.zeros(2, SLOTS, dtype=torch.float64).share_memory_()
        self.posted = torch.zeros(2, dtype=torch.int64).share_memory_()

    def put(self, rank: int, number: int, parts: list[torch.Tensor], clock: SimulatedClock) -> float:
        """Both parts to where they belong: rank 0's ends in the middle of a place, rank 1's begins there.

        Returns when they are there, which is when the transfer is started.
        """
        for receiver, part in enumerate(parts):
            first = self.numbers - part.numel() if rank == 0 else self.numbers
            self.data[receiver, number % SLOTS, first : first + part.numel()] = part
        moment = clock.now()
        self.started[rank, number % SLOTS] = moment
        self.posted[rank] = number + 1
        return moment

    def take(self, rank: int, number: int, lengths: tuple[int, ...]) -> tuple[torch.Tensor, float]:
        """What both ranks have put there, one behind the other, and when the other one has started."""
        while int(self.posted[1 - rank]) <= number:
            time.sleep(LOOK_S)
        place = self.data[rank, number % SLOTS]
        received = place[self.numbers - lengths[0] : self.numbers + lengths[1]]
        return received, float(self.started[1 - rank, number % SLOTS])


@dataclass
class EmulatedAxis(Axis):
    """`events` has each start and wait, by the number of its exchange; `carried_s` is what the link took for all."""

    clock: SimulatedClock = field(default_factory=SimulatedClock)
    bandwidth: float = 1.0
    latency_s: float = 0.0
    mailboxes: Mailboxes | None = None
    events: list[tuple[str, int]] = field(default_factory=list)
    under_way: list[Transfer] = field(default_factory=list)
    free_s: float = 0.0  # when the link has carried what has arrived
    number: int = 0
    carried_s: float = 0.0

    def all_to_all(
        self, send: torch.Tensor, *, send_lengths: tuple[int, ...], receive_lengths: tuple[int, ...]
    ) -> torch.Tensor:
        """As `Axis.all_to_all`."""
        return self.start_all_to_all(send, send_lengths=send_lengths, receive_lengths=receive_lengths).wait()

    def start_all_to_all(
        self, send: torch.Tensor, *, send_lengths: tuple[int, ...], receive_lengths: tuple[int, ...]
    ) -> Any:  # noqa: ANN401
        """As `Axis.start_all_to_all`."""
        return Transfer(self, send, send_lengths, receive_lengths)

    def let_pass(self) -> None:
        """As `Axis.let_pass`, of the exchange that was started last."""
        self.events.append(("let pass", self.number - 1))


class Transfer:
    """Bytes on an emulated link."""

    def __init__(
        self, axis: EmulatedAxis, send: torch.Tensor, send_lengths: tuple[int, ...], receive_lengths: tuple[int, ...]
    ) -> None:
        self.axis, self.lengths, self.number = axis, receive_lengths, axis.number
        axis.number += 1
        axis.events.append(("start", self.number))
        num_bytes = (send.numel() - send_lengths[axis.index]) * send.element_size()
        axis.traffic.add(num_bytes)
        self.takes_s = axis.latency_s + num_bytes / axis.bandwidth
        axis.carried_s += self.takes_s
        self.arrives_s = 0.0
        if axis.mailboxes is None:
            self.received = send.new_zeros(sum(receive_lengths))
            self.began_s = axis.clock.now()
        else:
            parts = list(send.split(list(send_lengths)))
            self.began_s = axis.mailboxes.put(axis.index, self.number, parts, axis.clock)
        axis.under_way.append(self)

    def wait(self) -> torch.Tensor:
        """What arrived, when the link has carried it and what was started before."""
        axis = self.axis
        axis.events.append(("wait", self.number))
        while axis.under_way and axis.under_way[0].number <= self.number:
            axis.under_way.pop(0).arrive()
        axis.clock.sleep_until(self.arrives_s)
        return self.received

    def arrive(self) -> None:
        """Find out when it does, which follows from when both ranks have started it."""
        started_s = self.began_s
        if self.axis.mailboxes is not None:
            self.received, other_s = self.axis.mailboxes.take(self.axis.index, self.number, self.lengths)
            started_s = max(started_s, other_s)
        self.arrives_s = self.axis.free_s = max(self.axis.free_s, started_s) + self.takes_s
