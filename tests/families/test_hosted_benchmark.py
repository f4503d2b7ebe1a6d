"""Parallel Benchmark and Parallel Sampler with models that ComfyUI's own modules compute, video and sound too."""

from __future__ import annotations

from typing import Any

import pytest

from host.client import ComfyClient, Workflow
from host.pack_workflows import TOLERANCE, parallel
from parallel_runtime.report.schema import validate
from parallel_runtime.report.text import describe

from .variants import BY_NAME

SOUND = BY_NAME["ltx-2 t2v"]  # five heads, which two ranks share unevenly, and a latent of video and sound


def ours(sampler: str, **inputs: Any) -> Workflow:
    """Its graph with our loader and a node of ours for its sampler; what needs the latent is left out."""
    graph = parallel(SOUND.graph(steps=1), loader="ParallelModelLoader", sampler=sampler, mode="manual", ulysses=2)
    graph = {name: node for name, node in graph.items() if not name.startswith("save") and name != "separate"}
    graph["sampler"]["inputs"] |= inputs
    slot = 0 if sampler == "ParallelBenchmark" else 1
    show = {"timing": ["sampler", slot], "filename_prefix": "benchmark/hosted"}
    return graph | {"show": {"class_type": "ShowTimingReport", "inputs": show}}


def report_of(client: ComfyClient, graph: Workflow) -> dict[str, Any]:
    (report,) = client.queue(graph).require_success().outputs["show"]["parallel_dit"]
    validate(report)
    return dict(report)


def test_a_benchmark_holds_plans_against_one_rank_and_stock(hosted_client: ComfyClient) -> None:
    inputs = {"plans": "ulysses=2\nring=2", "warmup": 0, "runs": 1, "stock": True}
    report = report_of(hosted_client, ours("ParallelBenchmark", **inputs))
    rows = {row["name"]: row for row in report["contenders"]}
    assert [row["kind"] for row in report["contenders"]] == ["one_rank", "one_process", "plan", "plan"]
    assert all(row["error"] <= TOLERANCE for row in report["contenders"][1:]), report["contenders"]
    assert rows["uly2"]["speedup"] == pytest.approx(rows["one rank"]["median_s"] / rows["uly2"]["median_s"])
    assert rows["uly2"]["plan"]["degrees"]["ulysses"] == 2
    assert report["model"]["file"] == SOUND.file
    run = report_of(hosted_client, ours("ParallelSampler"))
    assert (run["model"], run["plan"]["name"]) == (report["model"], "uly2")
    assert run["sizes"] == report["sizes"], "by which the panel knows that the benchmark is of this run"
    assert SOUND.file in describe(run) and "uly2" in describe(run)
