"""Heartbeats and previews follow the device: nothing is said of a block that is only queued, and nobody waits long."""

from collections.abc import Callable

import pytest
import torch

from parallel_runtime import timing
from parallel_runtime.timing import BLOCKS_AHEAD, LaunchThrottle
from parallel_runtime.worker import host_copies
from parallel_runtime.worker.host_copies import HostCopies

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class Queue:
    """A device that does what is queued in order, and only when it is told to or waited for."""

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []
        self.done = 0

    def put(self, work: Callable[[], None] = lambda: None) -> "Point":
        self.work.append(work)
        return Point(self, len(self.work))

    def advance(self, count: int) -> None:
        for work in self.work[self.done : self.done + count]:
            work()
            self.done += 1


class Point:
    """Where the queue ended when it was made, as a CUDA event."""

    def __init__(self, queue: Queue, at: int) -> None:
        self.queue, self.at = queue, at

    def query(self) -> bool:
        return self.queue.done >= self.at

    def synchronize(self) -> None:
        self.queue.advance(self.at - self.queue.done)


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Queue:
    made = Queue()
    monkeypatch.setattr(timing, "point_of", lambda device: made.put() if device.type == "cuda" else None)

    class Beside:
        def __init__(self, device: torch.device) -> None:
            assert device == GPU

        def pinned(self, shape: torch.Size, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.full(shape, float("nan"), dtype=dtype)

        def start(self, pinned: torch.Tensor, rows: torch.Tensor) -> Point:
            return made.put(lambda: pinned.copy_(rows))

    monkeypatch.setattr(host_copies, "SideStream", Beside)
    return made


def test_a_heart_beats_for_blocks_that_are_done_and_the_host_stays_near_the_device(queue: Queue) -> None:
    beats: list[int] = []
    pace = LaunchThrottle(GPU, lambda: beats.append(queue.done))
    for block in range(57):
        pace.block_queued()
        assert len(beats) == max(0, block + 1 - BLOCKS_AHEAD), "no beat for what is only queued"
        assert len(queue.work) - queue.done == min(block + 1, BLOCKS_AHEAD), "the host runs no further ahead"
    assert beats == list(range(1, 57 - BLOCKS_AHEAD + 1)), "a beat as soon as its block is done"
    queue.advance(3)
    pace.collect()
    assert len(beats) == 57 - BLOCKS_AHEAD + 3, "while it waits for leave, a beat for each block that gets done"
    pace.drain()
    assert len(beats) == 57


def test_on_the_cpu_a_block_is_done_when_it_returns(queue: Queue) -> None:
    beats: list[None] = []
    pace = LaunchThrottle(CPU, lambda: beats.append(None))
    for block in range(20):
        pace.block_queued()
        assert len(beats) == block + 1
    assert queue.work == []


def test_a_preview_is_in_its_place_before_it_is_told_of_and_nobody_waits_for_it(queue: Queue) -> None:
    copies, told, targets = HostCopies(GPU), [], [torch.zeros(2, 3), torch.zeros(2, 3)]
    copies.reserve(torch.Size((2, 3)))
    for step, target in enumerate(targets):
        copies.start(target, torch.full((2, 3), step + 1.0))
        copies.then(lambda step=step: told.append((step, [float(each.mean()) for each in targets])))
    assert (queue.done, told) == (0, []), "started, not waited for"
    assert all(float(target.sum()) == 0 for target in targets)
    queue.advance(1)
    copies.collect()
    assert told == [(0, [1.0, 0.0])]
    copies.drain()
    assert told[1:] == [(1, [1.0, 2.0])]


def test_off_a_gpu_a_preview_is_a_plain_copy(queue: Queue) -> None:
    copies, told, target = HostCopies(CPU), [], torch.zeros(3)
    copies.reserve(target.shape)
    copies.start(target, torch.ones(3))
    copies.then(lambda: told.append(float(target.sum())))
    assert (told, queue.work) == ([3.0], [])
