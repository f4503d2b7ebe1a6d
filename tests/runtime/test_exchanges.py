"""What exchanges of one rank send and count, without the others, and what lets them pass before attention."""

import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from parallel_runtime.choices import choice_for
from parallel_runtime.parallel import collectives, ring
from parallel_runtime.parallel.collectives import Axis
from parallel_runtime.parallel.kernels import attention_with_lse
from parallel_runtime.parallel.ring import RingPass
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.worker.mesh import Groups, Mesh


class Done:
    def wait(self) -> None:
        """At once."""


def test_of_uneven_rows_all_but_this_ranks_own_are_counted() -> None:
    group = SimpleNamespace(alltoall_base=lambda *_: Done())
    axis = Axis("ulysses", size=3, index=1, group=group)  # type: ignore[arg-type]
    sent = axis.start_all_to_all(torch.ones(7, 2), send_lengths=(4, 2, 1), receive_lengths=(1, 2, 1))
    assert sent.wait().shape == (4, 2)
    assert (axis.traffic.calls, axis.traffic.num_bytes) == (1, 5 * 2 * 4)


@pytest.mark.parametrize(("sent", "received"), [(3, 2), (0, 2), (3, 0), (0, 0)])
def test_a_hop_is_an_exchange_of_all_ranks_and_no_messages_whose_memory_waits_for_the_device(
    monkeypatch: pytest.MonkeyPatch, sent: int, received: int
) -> None:
    exchanged = list[tuple[list[int], list[int]]]()

    def alltoall_base(target: torch.Tensor, source: torch.Tensor, *rows: Any) -> Done:
        assert (target.shape, source.shape) == ((2, received, 3), (2, sent, 3)), "of each, so many rows of its own"
        exchanged.append(rows[:2])
        return Done()

    monkeypatch.setattr(dist, "get_backend", lambda _: "nccl")
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda _: pytest.fail("single messages"))
    for size, of_ranks in ((2, ([2, 0], [2, 0])), (3, ([2, 0, 0], [0, 0, 2]))):
        axis = Axis("ring", size=size, index=1, group=SimpleNamespace(alltoall_base=alltoall_base))  # type: ignore[arg-type]
        exchanged.clear()
        assert axis.start_shift(torch.ones(2, sent, 3), (2, received, 3)).wait().shape == (2, received, 3)
        assert exchanged == [of_ranks] and axis.traffic.num_bytes == 4 * 6 * sent


@pytest.mark.parametrize(("lengths", "ways"), [(None, ["gather"]), ((2, 2), ["gather"]), ((3, 1), ["messages"])])
def test_parts_of_one_length_are_gathered_by_the_backends_own_operation(
    monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, int] | None, ways: list[str]
) -> None:
    ran: list[str] = []
    monkeypatch.setattr(dist, "get_backend", lambda _: "nccl")
    monkeypatch.setattr(collectives, "_all_gather", lambda *_, **__: ran.append("gather") or Done())
    monkeypatch.setattr(dist, "P2POp", lambda *_: None)
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda _: ran.append("messages") or [Done()])
    mine = torch.ones(lengths[0] if lengths else 2)
    collectives.AllGather(Axis("shards", size=2, index=0), mine, torch.empty(4), lengths).wait()
    assert ran == ways


def test_what_is_waited_for_at_once_is_on_the_stream_that_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch is told by `asyncOp`: without it no stream of NCCL's own is joined."""
    told: list[object] = []

    def alltoall_base(target: torch.Tensor, source: torch.Tensor, *given: Any) -> Done:
        told.append(given[-1].asyncOp)
        return Done()

    def gather(target: torch.Tensor, source: torch.Tensor, *, group: object, async_op: bool) -> Done | None:
        told.append(async_op)
        return Done() if async_op else None

    monkeypatch.setattr(dist, "AllToAllOptions", lambda: SimpleNamespace(asyncOp=True))
    monkeypatch.setattr(dist, "get_backend", lambda _: "nccl")
    monkeypatch.setattr(collectives, "_all_gather", gather)
    axis, lengths = Axis("ulysses", size=2, group=SimpleNamespace(alltoall_base=alltoall_base)), (1, 1)  # type: ignore[arg-type]
    axis.all_to_all(torch.ones(2, 3), send_lengths=lengths, receive_lengths=lengths)
    axis.start_all_to_all(torch.ones(2, 3), send_lengths=lengths, receive_lengths=lengths).wait()
    axis.all_gather(torch.ones(2), torch.empty(4))
    axis.start_all_gather(torch.ones(2), torch.empty(4)).wait()
    assert told == [False, True, False, True]


@pytest.mark.parametrize(
    ("sent", "received", "sizes"),
    [((2, 2), (2, 2), ([], [])), ((3, 1), (3, 3), ([3, 3], [3, 1])), ((0, 0), (0, 0), ([0, 0], [0, 0]))],
)
def test_equal_runs_are_sent_without_sizes(
    sent: tuple[int, int], received: tuple[int, int], sizes: tuple[list[int], list[int]]
) -> None:
    given: list[tuple[Any, ...]] = []
    group = SimpleNamespace(alltoall_base=lambda target, source, *rest: given.append(rest[:2]) or Done())
    axis = Axis("ulysses", size=2, group=group)  # type: ignore[arg-type]
    axis.all_to_all(torch.ones(sum(sent), 3), send_lengths=sent, receive_lengths=received)
    assert given == [sizes]


def test_each_hop_passes_before_the_attention_that_hides_it_and_the_last_attention_waits_for_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []

    class RingOfThree(Axis):
        def start_shift(self, send: torch.Tensor, shape: tuple[int, ...]) -> SimpleNamespace:  # type: ignore[override]
            order.append("hop")
            return SimpleNamespace(wait=send.clone)

    def attend(named: str, *qkv: torch.Tensor, **more: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        order.append("attend")
        return attention_with_lse(*qkv)

    monkeypatch.setattr(ring, "attend_with_lse", attend)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: order.append(f"{cycles} cycles"))
    q, k, v = (torch.randn(1, 2, 1, 4) for _ in range(3))
    for cycles, passes in ((7, ["7 cycles"]), (0, [])):
        order.clear()
        axis = RingOfThree("ring", 3, 0, head_start_cycles=cycles)
        RingPass(axis, k, v, lengths=(2, 2, 2)).attend(q, mask=None)
        assert order == [*(["hop", *passes, "attend"] * 2), "attend"]


def test_no_hop_starts_while_keys_are_held_that_were_sent_and_attended_to() -> None:
    """Memory of an array is freed with its last view."""
    alive, held = list[weakref.ref[np.ndarray]](), list[int]()

    class RingOfFour(Axis):
        def start_shift(self, send: torch.Tensor, shape: tuple[int, ...]) -> SimpleNamespace:  # type: ignore[override]
            arriving = np.ones(shape, dtype=np.float32)
            held.append(sum(array() is not None for array in alive))
            alive.append(weakref.ref(arriving))
            return SimpleNamespace(wait=lambda: torch.from_numpy(arriving), source=send)

    q, k, v = (torch.randn(1, 2, 1, 4) for _ in range(3))
    around = RingPass(RingOfFour("ring", 4, 0), k, v, lengths=(2, 2, 2, 2))
    assert around.attend(q, mask=None) is not None
    assert held == [0, 1, 1], "what is sent on"


def test_the_axes_of_a_device_have_the_head_start_that_was_chosen_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    chosen = choice_for((9, 0)).head_start_cycles
    for device, cycles in (("cuda:0", chosen), ("cpu", 0)):
        mesh = Mesh(ParallelPlan(), device=torch.device(device), groups=Groups(), show_waiting=lambda _: None)
        assert {axis.head_start_cycles for axis in mesh.axes.values()} == {cycles}
    assert chosen > 0
