"""Corrupting copies are found byte by byte, between ranks that are threads here."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from parallel_runtime.parallel import pattern
from parallel_runtime.parallel.collectives import Axis

CPU = torch.device("cpu")
Spoil = Callable[[int, int, torch.Tensor], torch.Tensor]  # sender, receiver, what is sent -> what arrives


class Wire:
    """What the ranks of an axis have sent each other, and when all of them have."""

    def __init__(self, size: int, spoil: Spoil) -> None:
        self.spoil, self.sent, self.all = spoil, dict[tuple[int, int], torch.Tensor](), threading.Barrier(size)

    def arrived(self, sender: int, receiver: int) -> torch.Tensor:
        return self.spoil(sender, receiver, self.sent[sender, receiver].clone())


class Threads(Axis):
    """An axis whose ranks are threads."""

    def __init__(self, size: int, index: int, wire: Wire) -> None:
        super().__init__("ulysses", size, index)
        self.wire = wire

    def all_to_all(self, send: torch.Tensor, *, send_lengths: Any, receive_lengths: Any) -> torch.Tensor:
        for peer, run in enumerate(send.split_with_sizes(list(send_lengths))):
            self.wire.sent[self.index, peer] = run
        self.wire.all.wait(300)
        found = [self.wire.arrived(peer, self.index) for peer in range(self.size)]
        assert [len(each) for each in found] == list(receive_lengths)
        self.wire.all.wait(300)
        return torch.cat(found)

    def start_all_to_all(self, send: torch.Tensor, **lengths: Any) -> Any:
        arrived = self.all_to_all(send, **lengths)
        return SimpleNamespace(wait=lambda: arrived)

    def start_shift(self, send: torch.Tensor, shape: tuple[int, ...]) -> Any:
        after, before = (self.index + 1) % self.size, (self.index - 1) % self.size
        self.wire.sent[self.index, after] = send

        def wait() -> torch.Tensor:
            self.wire.all.wait(300)
            arrived = self.wire.arrived(before, self.index)
            assert arrived.shape == shape
            return arrived

        return SimpleNamespace(wait=wait)


def test_a_rank_shows_life_wherever_a_part_of_the_check_is_done() -> None:
    """What takes long the first time, kernels and connections, has a deadline of its own; a wait has none within it."""
    done: list[str] = []

    class Noted(Axis):
        def all_to_all(self, send: torch.Tensor, **_: Any) -> torch.Tensor:
            done.append("exchanged")
            return send

        def start_shift(self, send: torch.Tensor, shape: tuple[int, ...]) -> Any:
            done.append("connected")
            return SimpleNamespace(wait=lambda: done.append("shifted") or send)

    pattern.count_wrong_bytes(Noted("ulysses", 1, 0), CPU, lambda: done.append("beat"))
    assert done == ["beat", "exchanged", "beat", "beat", "connected", "beat", "shifted"]


def counted(size: int, spoil: Spoil, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The wrong bytes that each rank counts."""
    monkeypatch.setattr(pattern, "RUN_BYTES", 600)
    wire = Wire(size, spoil)
    with ThreadPoolExecutor(size) as ranks:
        return list(ranks.map(lambda index: pattern.count_wrong_bytes(Threads(size, index, wire), CPU), range(size)))


def flipped(sender: int, receiver: int, run: torch.Tensor) -> torch.Tensor:
    """The last byte that the second rank sends is another."""
    if sender == 1:
        run[-1] ^= 1
    return run


@pytest.mark.parametrize("size", [2, 3])
def test_each_rank_counts_the_bytes_that_arrived_otherwise(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert counted(size, lambda sender, receiver, run: run, monkeypatch) == [0] * size
    by_ring = (1 + 1) % size  # which the second rank also sends to in the ring
    found = counted(size, flipped, monkeypatch)
    assert found == [1 + (index == by_ring) for index in range(size)]


def test_bytes_are_of_one_sender_one_receiver_and_one_place() -> None:
    runs = {(a, b): pattern._run(a, b, 600, CPU) for a in range(3) for b in range(3)}
    assert runs[1, 2][[0, 1, 250, 251, 511]].tolist() == [69, 100, 139, 171, 40] and runs[1, 2].dtype == torch.uint8
    assert len({tuple(each.tolist()) for each in runs.values()}) == 9
