"""A Chrome trace per rank, on request: what a rank ran, readable by Chrome and Perfetto, and nothing private."""

import gzip
import json
from collections.abc import Iterator

import pytest
import torch

from parallel_runtime.checkpoint import ModelSpec, read_header
from parallel_runtime.cli.verify import PlanRunner
from parallel_runtime.cli.workload import Workload
from parallel_runtime.devices import parse_devices
from parallel_runtime.models.flux.config import FluxConfig
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.calls import TRACE_BYTES, whole_trace
from parallel_runtime.pool.pool import Pool


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Pool]:
    with Pool(parse_devices("cpu:2").devices, threads_per_rank=1) as pool:
        yield pool


@pytest.mark.slow
def test_every_rank_traces_its_operators_and_the_result_is_the_same(two_ranks: Pool, sample: ModelSpec) -> None:
    tensors = Workload(width=128, height=128, text_tokens=16).tensors(FluxConfig.from_header(read_header(sample.path)))
    runner = PlanRunner(two_ranks, sample, ParallelPlan(ulysses=2), options={"trace": True})
    traced = runner(tensors)
    assert list(runner.traces) == [0, 1]
    for number, trace in runner.traces.items():
        text = gzip.decompress(trace).decode()
        name, *events = json.loads(text)["traceEvents"]
        assert name["args"] == {"name": f"rank {number}"}
        assert {event["pid"] for event in events} == {number}
        assert all(event["ph"] == "X" and event["dur"] >= 0 for event in events)
        names = {event["name"] for event in events}
        assert any("all_to_all" in name for name in names)
        assert any("scaled_dot_product" in name for name in names)
        assert "/" not in text.replace("nccl:", ""), "a path"
    runner.options = {}
    assert torch.equal(runner(tensors), traced)
    assert runner.traces == {}


def test_a_trace_without_room_is_refused_and_not_cut() -> None:
    with pytest.raises(ValueError, match="at most 8388608; trace fewer calls"):
        whole_trace(torch.empty(0, dtype=torch.uint8), TRACE_BYTES + 1)
