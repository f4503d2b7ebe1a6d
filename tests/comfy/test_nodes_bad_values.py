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


def nan_latent() -> torch.Tensor:
    latent = torch.zeros(1, 16, 8, 8)
    latent[0, 3, 2, 2] = torch.nan
    return latent


LATENTS = {
    "NaN in the latent": (nan_latent(), ("NaN", "look at the node that made it")),
    "wrong channel count": (torch.ones(1, 4, 8, 8), ("16 channels after patching", "takes 64", "use a Flux latent")),
}


@pytest.mark.parametrize("mistake", LATENTS)
def test_a_latent_that_cannot_be_sampled_is_one_clear_error(
    mistake: str, client: ComfyClient, comfy_server: ComfyServer, tiny_models: TinyModels
) -> None:
    latent, says = LATENTS[mistake]
    name = f"bad_{len(mistake)}.latent"
    (comfy_server.base / "input").mkdir(exist_ok=True)
    tensors = {"latent_tensor": latent, "latent_format_version_0": torch.tensor([])}
    save_file(tensors, comfy_server.base / "input" / name)
    graph = parallel(from_file(workflows.text_to_image(tiny_models, width=64, height=64), name))
    result = client.queue(to_latent(graph))
    assert (result.status, result.error_node) == ("error", "KSampler")
    first_line = result.error_message.splitlines()[0]
    assert [part for part in says if part not in first_line] == [], first_line
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


REFUSED = {
    "nan": ("default", ("guidance=nan is no number; look at the node that set it",)),
    "1e4": ("float16", ("guidance=10000 times 1000 is more than float16 holds", "at most 65.5", "or compute in bf")),
    "1e5": ("float16", ("guidance=inf times 1000 is more than float16 holds", "at most 65.5", "or compute in bf")),
}


@pytest.mark.parametrize("sampler", ["KSampler", "ParallelFluxSampler"])
@pytest.mark.parametrize("value", REFUSED)
def test_a_guidance_that_the_dtype_cannot_hold_times_1000_is_one_clear_error(
    value: str, sampler: str, client: ComfyClient, tiny_models: TinyModels
) -> None:
    dtype, says = REFUSED[value]
    result = client.queue(parallel(with_guidance(tiny_models, value), weight_dtype=dtype, sampler=sampler))
    assert (result.status, result.error_node) == ("error", sampler)
    first_line = result.error_message.splitlines()[0]
    assert [part for part in says if part not in first_line] == [], first_line
