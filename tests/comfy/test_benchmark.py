"""Parallel Benchmark: plans beside one rank and stock ComfyUI, in turn, with the error of each."""

import gzip
import json
from typing import Any

import pytest
from rounding import ROUNDING

from host import workflows
from host.client import ComfyClient, PromptRefusedError, Workflow
from host.pack_workflows import parallel
from host.tiny_models import TinyModels


def benchmark(tiny: TinyModels, *, vae: bool = False, **inputs: Any) -> Workflow:
    """A small graph that ends in a benchmark, and shows its report."""
    graph = parallel(workflows.text_to_image(tiny, seed=301), sampler="ParallelBenchmark")
    del graph["decode"], graph["save"]
    graph["sampler"]["inputs"] |= {"warmup": 1, "runs": 3, "plans": "", "stock": False} | inputs
    if vae:
        graph["sampler"]["inputs"]["vae"] = ["vae", 0]
    show = {"timing": ["sampler", 0], "filename_prefix": "benchmark/tiny"}
    return graph | {"show": {"class_type": "ShowTimingReport", "inputs": show}}


def test_plans_stand_beside_one_rank_and_stock_comfyui_and_each_rank_is_traced(
    client: ComfyClient, tiny_models: TinyModels
) -> None:
    asked = {"plans": "ulysses=2\n\nring=2\nulysses=2", "runs": 2, "stock": True, "vae": True, "trace": True}
    result = client.queue(benchmark(tiny_models, **asked))
    report = result.report("show")
    rows = {row["name"]: row for row in report["contenders"]}
    one_process = [name for name, row in rows.items() if row["kind"] == "one_process"]
    assert list(rows) == ["one rank", *one_process, "uly2", "ring2"]
    assert len(one_process) == 1
    assert (report["warmup"], report["runs"], report["sampling"]["seed"]) == (1, 2, 301)
    for name in ("uly2", "ring2"):
        row = rows[name]
        assert len(row["run_s"]) == 2
        assert row["error"] <= ROUNDING
        assert row["speedup"] == pytest.approx(rows["one rank"]["median_s"] / row["median_s"])
        process_s = rows[one_process[0]]["median_s"]
        assert row["speedup_over_one_process"] == pytest.approx(process_s / row["median_s"])
        assert 0 < row["slowest_rank_s"] < row["median_s"]
        assert [len(rank["busy_s"]) for rank in row["ranks"]] == [2, 2]
    assert rows[one_process[0]]["error"] <= ROUNDING  # 0 where both round alike
    assert [row["loop"]["kind"] for row in rows.values()] == ["resident", "host", "resident", "resident"]
    assert len(report["vae"]["run_s"]) == 2
    assert "warnings" not in report, "the server runs with torch's attention, as a comparison of equals needs"
    assert result.outputs["show"]["images"][0]["filename"].endswith(".png")
    assert any("run 1 of 3: one rank" in text for _, text in result.texts)
    files = result.outputs["sampler"]["files"]
    assert report["traces"] == [item["filename"] for item in files]
    for number, item in enumerate(files):
        assert item["filename"].startswith(("uly2_", "ring2_")[number // 2])
        name, *events = json.loads(gzip.decompress(client.view(item)))["traceEvents"]
        assert name["args"] == {"name": f"rank {number % 2}"}
        assert number > 1 or any("all_to_all" in event["name"] for event in events)
    assert len(files) == 4


def test_an_empty_latent_is_decoded_as_it_is_sampled_and_a_run_of_no_step_has_no_trace(
    client: ComfyClient, tiny_models: TinyModels
) -> None:
    graph = benchmark(tiny_models, vae=True, warmup=0, runs=1, denoise=0.0, trace=True)
    graph["latent"]["class_type"] = "EmptyLatentImage"  # of 4 channels, where the model and the VAE have 16
    report = client.queue(graph).report("show")
    assert len(report["vae"]["run_s"]) == 1
    assert "traces" not in report


@pytest.mark.parametrize(
    ("plans", "words"),
    [
        ("ulysses=4", "needs 4 ranks, this MODEL has 2; name more devices in SP Config"),
        ("ulysses=2,weights=sharded", "compare plans of the same weights"),
    ],
)
def test_a_plan_that_cannot_run_is_refused_before_anything_runs(
    client: ComfyClient, tiny_models: TinyModels, plans: str, words: str
) -> None:
    result = client.queue(benchmark(tiny_models, plans=plans))
    assert words in result.error_line("ParallelBenchmark")
    assert not result.progress


def test_a_plan_that_is_none_is_refused_before_anything_is_queued(client: ComfyClient, tiny_models: TinyModels) -> None:
    with pytest.raises(PromptRefusedError, match="unknown plan key 'rings'"):
        client.queue(benchmark(tiny_models, plans="ulysses=2\nrings=2"))
