"""What the nodes measure: present where it was measured, absent where not, in /history for headless clients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from host import workflows
from host.client import ComfyClient, PromptResult, Workflow
from host.pack_workflows import parallel
from host.tiny_models import TinyModels

# A client times a node by when it hears of it, which may be a little after the node began.
CLIENTS_CLOCK_S = 0.2


def report_of(result: PromptResult, node: str) -> dict[str, Any]:
    """The one report a node put into its output."""
    (report,) = result.require_success().outputs[node]["parallel_dit"]
    return report


def timed(tiny: TinyModels, *, seed: int, steps: int = 3) -> Workflow:
    """The whole graph with all of our nodes."""
    graph = parallel(workflows.text_to_image(tiny, seed=seed, steps=steps), sampler="ParallelFluxSampler")
    graph["decode"]["class_type"] = "TimedVAEDecode"
    return graph


def test_the_sampler_reports_each_rank_and_each_step(client: ComfyClient, tiny_models: TinyModels) -> None:
    result = client.queue(timed(tiny_models, seed=91))
    report = report_of(result, "sampler")
    assert (report["schema"], report["kind"], report["steps"]) == (1, "denoise", 3)
    assert (report["model"], report["dtype"]) == (tiny_models.dev, "float32")
    assert (report["plan_name"], report["plan"]["ulysses"], report["devices"]) == ("uly2", 2, ["cpu:0", "cpu:1"])
    assert report["pool_generation"] >= 1
    assert (report["latent"], report["image_tokens"], report["text_tokens"]) == ([1, 16, 32, 32], 256, 256)
    assert len(report["step_s"]) == len(report["call_s"]) == 3
    assert sum(report["step_s"]) <= report["denoise_s"] < result.node_s["sampler"] + CLIENTS_CLOCK_S
    for rank, entry in enumerate(report["ranks"]):
        assert (entry["rank"], entry["device"]) == (rank, f"cpu:{rank}")
        assert all(0 < mine <= whole for mine, whole in zip(entry["call_s"], report["call_s"], strict=True))
        assert all(0 < part < whole for part, whole in zip(entry["communication_s"], entry["call_s"], strict=True))
        assert entry["memory"]["resident_bytes"] > 100e6
    assert len(report["ranks"]) == 2


def test_a_sampler_with_two_calls_a_step_reports_calls_and_steps_apart(
    client: ComfyClient, tiny_models: TinyModels
) -> None:
    graph = timed(tiny_models, seed=92)
    graph["sampler"]["inputs"]["sampler_name"] = "heun"
    report = report_of(client.queue(graph), "sampler")
    assert len(report["step_s"]) == 3
    assert len(report["call_s"]) == 5  # heun corrects every step but the last


def test_what_was_not_measured_is_absent(client: ComfyClient, tiny_models: TinyModels) -> None:
    graph = timed(tiny_models, seed=93)
    graph["model"] = workflows.text_to_image(tiny_models)["model"]
    report = report_of(client.queue(graph), "sampler")
    assert set(report) == {"schema", "kind", "steps", "denoise_s", "step_s", "latent"}


def test_timed_vae_decode_gives_vae_decodes_image_and_counts_only_the_decode(
    client: ComfyClient, tiny_models: TinyModels
) -> None:
    graph = timed(tiny_models, seed=94)
    graph["stock"] = {"class_type": "VAEDecode", "inputs": graph["decode"]["inputs"]}
    graph["save_stock"] = {"class_type": "SaveImage", "inputs": {"images": ["stock", 0], "filename_prefix": "stock"}}
    result = client.queue(graph)
    report = report_of(result, "decode")
    assert (report["schema"], report["kind"], report["device"]) == (1, "vae_decode", "cpu")
    assert (report["latent"], report["image"]) == ([1, 16, 32, 32], [1, 256, 256, 3])
    assert 0 < report["vae_decode_s"] <= result.node_s["decode"] + CLIENTS_CLOCK_S
    pictures = [client.image(result.outputs[node]["images"][0]) for node in ("save", "save_stock")]
    assert np.array_equal(*(np.asarray(picture) for picture in pictures))
    assert "vae_decode_s" not in report_of(result, "sampler")


@pytest.mark.parametrize("node", ["sampler", "decode"])
def test_timing_travels_on_its_socket_too(node: str, client: ComfyClient, tiny_models: TinyModels) -> None:
    graph = timed(tiny_models, seed=95)
    graph["show"] = {"class_type": "PreviewAny", "inputs": {"source": [node, 1]}}
    result = client.queue(graph).require_success()
    assert '"schema": 1' in result.outputs["show"]["text"][0]
