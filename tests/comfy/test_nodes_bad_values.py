"""Values that cannot be sampled: one clear error in the graph, the pool usable, the next prompt right."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from host import workflows
from host.client import ComfyClient, Workflow
from host.pack_workflows import TOLERANCE, latent_of, parallel, relative_error, to_latent
from host.server import ComfyServer
from host.tiny_models import TinyModels


def from_file(graph: Workflow, name: str) -> Workflow:
    """The graph sampling from a saved latent in place of an empty one."""
    graph["latent"] = {"class_type": "LoadLatent", "inputs": {"latent": name}}
    graph["sampler"]["inputs"]["denoise"] = 0.5
    return graph


def test_a_latent_of_another_model_is_one_error_on_the_node_on_which_stock_has_one(
    client: ComfyClient, comfy_server: ComfyServer, tiny_models: TinyModels
) -> None:
    latent, name = torch.ones(1, 4, 8, 8), "bad.latent"
    (comfy_server.base / "input").mkdir(exist_ok=True)
    tensors = {"latent_tensor": latent, "latent_format_version_0": torch.tensor([])}
    save_file(tensors, comfy_server.base / "input" / name)
    graph = from_file(workflows.text_to_image(tiny_models, width=64, height=64), name)
    stock, ours = client.queue(to_latent(graph)), client.queue(to_latent(parallel(graph)))
    assert (stock.status, stock.error_node) == (ours.status, ours.error_node) == ("error", "KSampler")
    assert "must match" in ours.error_message.splitlines()[0]
    client.queue(to_latent(parallel(workflows.text_to_image(tiny_models, seed=63)))).require_success()


def with_guidance(tiny: TinyModels, value: str, *, seed: int = 64) -> Workflow:
    graph = to_latent(workflows.text_to_image(tiny, width=64, height=64, seed=seed))
    graph["value"] = {"class_type": "SetGuidance", "inputs": {"conditioning": ["guidance", 0], "value": value}}
    graph["sampler"]["inputs"]["positive"] = ["value", 0]
    return graph


@pytest.mark.parametrize("value", ["0", "1e4"])
def test_a_guidance_at_the_edge_is_sampled_as_stock_does(
    value: str, client: ComfyClient, tiny_models: TinyModels
) -> None:
    graph = with_guidance(tiny_models, value)
    stock = latent_of(client, graph)
    assert relative_error(latent_of(client, parallel(graph)), stock) <= TOLERANCE
    assert relative_error(latent_of(client, with_guidance(tiny_models, "3.5")), stock) > 1e-2
