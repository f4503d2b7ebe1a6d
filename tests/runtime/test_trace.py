"""A Chrome trace per rank, on request: what a rank ran, readable by Chrome and Perfetto, and nothing private."""

import gzip
import json

import pytest
import torch

from host.tiny_hosted import call
from parallel_runtime.checkpoint import ModelSpec
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.calls import TRACE_BYTES, whole_trace
from parallel_runtime.pool.pool import Pool


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


def test_a_trace_without_room_is_refused_and_not_cut() -> None:
    with pytest.raises(ValueError, match="at most 8388608; trace fewer calls"):
        whole_trace(torch.empty(0, dtype=torch.uint8), TRACE_BYTES + 1)
