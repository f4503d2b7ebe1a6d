"""A Chrome trace per rank, on request: what a rank ran, readable by Chrome and Perfetto, and nothing private."""

import gzip
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from made_replies import step_reply

from host.tiny_hosted import call
from parallel_runtime.checkpoint import ModelSpec
from parallel_runtime.plan import BatchSlice, ParallelPlan
from parallel_runtime.pool.calls import TRACE_BYTES, whole_trace
from parallel_runtime.pool.pool import Pool
from parallel_runtime.pool.worker_group import WorkerGroup


@pytest.mark.slow
def test_every_rank_traces_its_operators_and_the_result_is_the_same(eight_ranks: Pool, tiny_hosted: ModelSpec) -> None:
    plan = ParallelPlan(ulysses=2)
    traced = eight_ranks.run(tiny_hosted, plan, [call(options={"trace": True})])
    assert list(traced.traces) == [0, 1]
    for number, trace in traced.traces.items():
        text = gzip.decompress(trace).decode()
        name, *events = json.loads(text)["traceEvents"]
        assert name["args"] == {"name": f"rank {number}"}
        assert {event["pid"] for event in events} == {number}
        assert all(event["ph"] == "X" and event["dur"] >= 0 for event in events)
        names = {event["name"] for event in events}
        assert any("all_to_all" in name for name in names)
        assert "aten::linear" in names
        assert "/" not in text.replace("nccl:", ""), "a path"
    plain = eight_ranks.run(tiny_hosted, plan, [call()])
    assert torch.equal(plain.outs[0], traced.outs[0])
    assert plain.traces == {}


def test_each_ranks_trace_is_read_where_it_was_given_room() -> None:
    """Behind the results of the calls."""
    numbers = torch.arange(16, dtype=torch.uint8).reshape(4, 4)
    rooms = dict(zip(("0.out", "1.out", "trace.0", "trace.1"), numbers, strict=True))
    arena = SimpleNamespace(take=rooms.__getitem__)
    arena.place = lambda inputs, results: ([*inputs, *results], {})
    generation: Any = SimpleNamespace(ranks=[None] * 2, told_ranks=2, reach=int, arena=arena)
    generation.ask = lambda *_, **__: [step_reply(trace_bytes=3), step_reply(trace_bytes=2)]
    group = WorkerGroup(
        generation, load_deadline_s=1.0, budget_bytes=None, check_copies=False, overlap=lambda plan: None
    )
    calls, groups = [call(options={"trace": True}), call()], ((BatchSlice(call=0, start=0, stop=1),),)
    done = group.run(1, ParallelPlan(ulysses=2), calls, groups, lambda: None, on_sent=lambda: None)
    assert done.traces == {0: bytes([8, 9, 10]), 1: bytes([12, 13])}
    assert [out.tolist() for out in done.outs] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_trace_without_room_is_refused_and_not_cut() -> None:
    with pytest.raises(ValueError, match="at most 8388608; trace fewer calls"):
        whole_trace(torch.empty(0, dtype=torch.uint8), TRACE_BYTES + 1)
