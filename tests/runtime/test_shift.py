"""What a hop around the ring sends: both directions at once, and nothing that is empty."""

import pytest
import torch
import torch.distributed as dist

from parallel_runtime.parallel.collectives import Axis


class Done:
    def wait(self) -> None:
        """At once."""


@pytest.mark.parametrize(("sent", "received"), [(3, 2), (0, 2), (3, 0), (0, 0)])
def test_an_empty_part_is_neither_sent_nor_received(monkeypatch: pytest.MonkeyPatch, sent: int, received: int) -> None:
    batches: list[list[tuple[str, int, int]]] = []
    monkeypatch.setattr(dist, "P2POp", lambda op, tensor, peer, group: (op.__name__, tensor.numel(), peer))
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda messages: batches.append(messages) or [Done()])
    axis = Axis("ring", size=3, index=2)
    axis.start_shift(torch.ones(sent), torch.empty(received)).wait()
    wanted = [("isend", sent, 0)] * bool(sent) + [("irecv", received, 1)] * bool(received)
    assert batches == ([wanted] if wanted else [])
