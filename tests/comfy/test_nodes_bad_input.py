"""What a user can get wrong: one clear error on the right node, the server alive, the next prompt right."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from host import workflows
from host.client import ComfyClient, PromptRefusedError
from host.pack_workflows import TOLERANCE, latent_of, parallel, relative_error, to_latent
from host.server import ComfyServer
from host.tiny_models import TinyModels, write_flux

# What is wrong, the node that tells it, and what its first line must say: the value, the limit, the remedy.
MISTAKES: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "truncated in its weights": ({"file": "half.safetensors"}, "ParallelFluxLoader", ("half", "truncated", "again")),
    "truncated in its header": ({"file": "stub.safetensors"}, "ParallelFluxLoader", ("stub", "truncated", "again")),
    "not safetensors": ({"file": "text.safetensors"}, "ParallelFluxLoader", ("text", "not a safetensors file", "use")),
    "another format": ({"file": "pickled.pt"}, "ParallelFluxLoader", ("pickled.pt", "only .safetensors", "convert")),
    "no diffusion model": (
        {"file": "vae.safetensors"},
        "ParallelFluxLoader",
        ("vae", "no diffusion model", "choose a file of diffusion_models"),
    ),
}


@pytest.fixture(scope="module", autouse=True)
def bad_files(tiny_models: TinyModels) -> Iterator[None]:
    """Files among the models that cannot be used, while this module's tests run."""
    whole = tiny_models.diffusion_model(tiny_models.dev).read_bytes()
    contents = {
        "half.safetensors": whole[: len(whole) // 2],
        "stub.safetensors": whole[:100],
        "text.safetensors": b"this is a web page, not a model " * 64,
        "pickled.pt": b"\x80\x04.",
        "vae.safetensors": (tiny_models.models / "vae" / tiny_models.vae).read_bytes(),
    }
    for name, content in contents.items():
        tiny_models.diffusion_model(name).write_bytes(content)
    yield
    for name in contents:
        tiny_models.diffusion_model(name).unlink()


@pytest.fixture(scope="module")
def right(comfy_server: ComfyServer, tiny_models: TinyModels) -> torch.Tensor:
    """What the prompt after a mistake must give."""
    return latent_of(ComfyClient(comfy_server.url), workflows.text_to_image(tiny_models, seed=31))


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_clear_error_and_the_next_prompt_is_right(
    mistake: str, client: ComfyClient, tiny_models: TinyModels, right: torch.Tensor
) -> None:
    config, node, says = MISTAKES[mistake]
    graph = workflows.text_to_image(tiny_models)
    graph["model"]["inputs"]["unet_name"] = config.get("file", tiny_models.dev)
    result = client.queue(to_latent(parallel(graph, **{k: v for k, v in config.items() if k != "file"})))
    assert (result.status, result.error_node, result.error_type) == ("error", node, "ValueError")
    first_line = result.error_message.splitlines()[0]
    assert [part for part in says if part not in first_line] == [], first_line
    after = latent_of(client, parallel(workflows.text_to_image(tiny_models, seed=31)))
    assert relative_error(after, right) <= TOLERANCE


def test_other_text_encoders_are_one_error_that_says_so_and_the_next_prompt_is_right(
    client: ComfyClient, tiny_models: TinyModels, right: torch.Tensor
) -> None:
    wide = write_flux(tiny_models.diffusion_model("wide.safetensors"), ctx=96)
    graph = workflows.text_to_image(tiny_models)
    graph["model"]["inputs"]["unet_name"] = wide.name
    result = client.queue(to_latent(parallel(graph)))
    wide.unlink()
    assert (result.status, result.error_node) == ("error", "KSampler")
    first_line = result.error_message.splitlines()[0]
    assert "shapes cannot be multiplied" in first_line and "text encoders that belong to this one" in first_line, (
        first_line
    )
    after = latent_of(client, parallel(workflows.text_to_image(tiny_models, seed=31)))
    assert relative_error(after, right) <= TOLERANCE


def test_a_file_that_is_gone_when_the_graph_runs_is_named(client: ComfyClient, tiny_models: TinyModels) -> None:
    client.object_info("ParallelFluxLoader")
    gone = write_flux(tiny_models.diffusion_model("gone.safetensors"))
    graph = workflows.text_to_image(tiny_models, seed=32)
    graph["model"]["inputs"]["unet_name"] = gone.name
    client.queue(to_latent(parallel(graph))).require_success()
    gone.unlink()
    with pytest.raises(PromptRefusedError, match=r"ParallelFluxLoader.*not in list.*gone\.safetensors"):
        client.queue(to_latent(parallel(graph)))


@pytest.mark.parametrize("name", ["../../../etc/passwd", "..\\secret.safetensors", "/etc/passwd"])
def test_a_path_out_of_the_models_folder_is_refused(name: str, client: ComfyClient, tiny_models: TinyModels) -> None:
    graph = workflows.text_to_image(tiny_models)
    graph["model"]["inputs"]["unet_name"] = name
    with pytest.raises(PromptRefusedError, match="not in list"):
        client.queue(to_latent(parallel(graph)))


@pytest.mark.parametrize("degree", [0, -1, 9])
def test_a_degree_out_of_range_is_refused_before_the_graph_runs(
    degree: int, client: ComfyClient, tiny_models: TinyModels
) -> None:
    graph = parallel(workflows.text_to_image(tiny_models), mode="manual", ulysses=degree)
    with pytest.raises(PromptRefusedError, match=r"SPConfig.*ulysses"):
        client.queue(to_latent(graph))


@pytest.mark.parametrize(
    "config",
    [{"devices": "8"}, {"devices": "all"}, {"devices": "all", "mode": "manual", "ulysses": 4, "ring": 2}],
    ids=["a count", "all", "all with degrees for eight"],
)
def test_a_workflow_saved_for_eight_devices_runs_on_what_is_there(
    config: dict[str, Any], client: ComfyClient, comfy_server: ComfyServer, tiny_models: TinyModels, right: torch.Tensor
) -> None:
    graph = parallel(workflows.text_to_image(tiny_models, seed=31), **config)
    assert relative_error(latent_of(client, graph), right) <= TOLERANCE
    if config.get("mode") == "manual":
        assert "ulysses=4,ring=2 needs 8 ranks" in comfy_server.log
