"""Show Timing Report: files that command-line clients see, and never an old run as if it were this one."""

import json
from typing import Any

import pytest

from host import workflows
from host.client import ComfyClient, PromptResult, Workflow
from host.pack_workflows import parallel
from host.tiny_models import TinyModels
from parallel_runtime.report.schema import validate


def shown(tiny: TinyModels, *, seed: int, **inputs: Any) -> Workflow:
    """A graph whose reports of sampling and decoding are shown."""
    graph = parallel(workflows.text_to_image(tiny, seed=seed), sampler="ParallelFluxSampler")
    graph["decode"]["class_type"] = "TimedVAEDecode"
    reports = {"timing": ["sampler", 1], "timing_2": ["decode", 1]}
    graph["show"] = {"class_type": "ShowTimingReport", "inputs": reports | inputs}
    return graph


def file_of(client: ComfyClient, result: PromptResult, kind: str) -> bytes:
    """The one file of a kind that the node lists, downloaded."""
    (item,) = result.require_success().outputs["show"][kind]
    return client.view(item)


def reports_of(client: ComfyClient, result: PromptResult) -> list[dict[str, Any]]:
    """The reports in the JSON file, each as the schema says."""
    reports = json.loads(file_of(client, result, "files"))
    for report in reports:
        validate(report)
    return reports


def test_a_run_from_the_cache_says_so_and_a_fresh_one_does_not(client: ComfyClient, tiny_models: TinyModels) -> None:
    graph = shown(tiny_models, seed=202, chart=False)
    first, _ = reports_of(client, client.queue(graph))
    again = client.queue(graph)
    assert set(again.cached) == set(graph) - {"show"}
    cached = reports_of(client, again)
    assert [report["from_cache"] for report in cached] == [True, True]
    assert cached[0] == first | {"from_cache": True}, "only the mark is new"
    assert again.outputs["show"]["text"][0].startswith("served from ComfyUI's cache: nothing ran in this prompt")
    graph["sampler"]["inputs"]["seed"] += 1
    assert [report["from_cache"] for report in reports_of(client, client.queue(graph))] == [False, False]


@pytest.mark.parametrize("prefix", ["../outside", "/outside"])
def test_nothing_is_written_outside_the_output_folder(
    client: ComfyClient, tiny_models: TinyModels, prefix: str
) -> None:
    result = client.queue(shown(tiny_models, seed=204, filename_prefix=prefix))
    assert "outside the output folder" in result.error_line("ShowTimingReport")
