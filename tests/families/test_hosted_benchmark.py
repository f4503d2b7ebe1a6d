"""Parallel Benchmark and Parallel Sampler with models that ComfyUI's own modules compute, video and sound too."""

from __future__ import annotations

from typing import Any

import pytest

from host.client import ComfyClient, Workflow
from host.pack_workflows import TOLERANCE, parallel
from parallel_runtime.report.schema import validate
from parallel_runtime.report.text import describe

from .variant import Variant
from .variants import BY_NAME

# Five heads, which two ranks share unevenly, and a latent of video and sound; the same by halves.
BENCHMARKED = (
    "ltx-2 t2v",
    *(pytest.param(name, marks=pytest.mark.full) for name in ("wan 2.1 t2v", "minimax h3 t2v")),
)


def ours(variant: Variant, sampler: str, **inputs: Any) -> Workflow:
    """The variant's graph with our loader and a node of ours for its sampler; what needs the latent is left out."""
    graph = parallel(variant.graph(steps=1), loader="ParallelModelLoader", sampler=sampler, mode="manual", ulysses=2)
    graph = {name: node for name, node in graph.items() if not name.startswith("save") and name != "separate"}
    graph["sampler"]["inputs"] |= inputs
    slot = 0 if sampler == "ParallelBenchmark" else 1
    show = {"timing": ["sampler", slot], "filename_prefix": "benchmark/hosted"}
    return graph | {"show": {"class_type": "ShowTimingReport", "inputs": show}}


def report_of(client: ComfyClient, graph: Workflow) -> dict[str, Any]:
    (report,) = client.queue(graph).require_success().outputs["show"]["parallel_dit"]
    validate(report)
    return dict(report)


@pytest.mark.parametrize("name", BENCHMARKED)
def test_a_benchmark_holds_plans_against_one_rank_and_stock(name: str, hosted_client: ComfyClient) -> None:
    variant = BY_NAME[name]
    inputs = {"plans": "ulysses=2\nring=2", "warmup": 0, "runs": 1, "stock": True}
    report = report_of(hosted_client, ours(variant, "ParallelBenchmark", **inputs))
    rows = {row["name"]: row for row in report["contenders"]}
    assert [row["kind"] for row in report["contenders"]] == ["one_rank", "one_process", "plan", "plan"]
    assert all(row["error"] <= TOLERANCE for row in report["contenders"][1:]), report["contenders"]
    assert rows["uly2"]["speedup"] == pytest.approx(rows["one rank"]["median_s"] / rows["uly2"]["median_s"])
    assert rows["uly2"]["plan"]["degrees"]["ulysses"] == 2
    assert report["model"]["file"] == variant.file
    run = report_of(hosted_client, ours(variant, "ParallelSampler"))
    assert (run["model"], run["plan"]["name"]) == (report["model"], "uly2")
    assert run["sizes"] == report["sizes"], "by which the panel knows that the benchmark is of this run"
    assert variant.file in describe(run) and "uly2" in describe(run)


def test_a_benchmark_refuses_a_plan_that_the_class_has_not(hosted_client: ComfyClient) -> None:
    graph = ours(BY_NAME["wan 2.1 t2v"], "ParallelBenchmark", plans="pipefusion=2", warmup=0, runs=1, stock=False)
    result = hosted_client.queue(graph)
    assert (result.status, result.error_node) == ("error", "ParallelBenchmark")
    assert "compare plans of the same weights" in result.error_message
