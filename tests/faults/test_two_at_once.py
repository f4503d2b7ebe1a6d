"""Two prompts, a prompt and a release, a prompt and POST /free at once, on a real ComfyUI: one after the other."""

from __future__ import annotations

import threading

import pytest

from host import workflows
from host.client import ComfyClient, PromptResult
from host.pack_workflows import TOLERANCE, parallel, relative_error, saved_latent, to_latent
from host.server import ComfyServer
from host.tiny_models import TinyModels

RELEASE = {"end": {"class_type": "ReleaseParallelPool", "inputs": {}}}
SMALL = {"width": 64, "height": 64}


@pytest.mark.parametrize(
    "other", ["prompt", *(pytest.param(each, marks=pytest.mark.full) for each in ("release", "free"))]
)
def test_two_at_once_are_one_after_the_other(
    other: str, comfy_server: ComfyServer, client: ComfyClient, tiny_models: TinyModels
) -> None:
    graphs = [workflows.text_to_image(tiny_models, seed=101 + turn, steps=6, **SMALL) for turn in range(2)]
    right = [saved_latent(client, client.queue(to_latent(graph))) for graph in graphs]
    results: dict[int, PromptResult] = {}

    def queue(number: int) -> None:
        results[number] = ComfyClient(comfy_server.url).queue(to_latent(parallel(graphs[number])), timeout_s=200)

    others = {
        "prompt": lambda: queue(1),
        "release": lambda: ComfyClient(comfy_server.url).queue(RELEASE, timeout_s=200).require_success(),
        "free": lambda: [ComfyClient(comfy_server.url).free() for _ in range(20)],
    }
    client.free()  # so that no result of an earlier turn is cached
    threads = [threading.Thread(target=queue, args=(0,)), threading.Thread(target=others[other])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(250)
    assert not any(thread.is_alive() for thread in threads)
    assert 0 in results
    for number, result in results.items():
        assert relative_error(saved_latent(client, result), right[number]) <= TOLERANCE
    again = workflows.text_to_image(tiny_models, seed=101, steps=6, **SMALL)
    again["positive"]["inputs"]["text"] += " "  # the same tokens, and nothing from a cache
    assert relative_error(saved_latent(client, client.queue(to_latent(parallel(again)))), right[0]) <= TOLERANCE
