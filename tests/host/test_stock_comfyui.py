"""The host itself: stock ComfyUI, without the pack, makes images from the tiny models.

If one of these fails, a failure of our nodes says nothing about our nodes.
"""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from host import workflows
from host.client import ComfyClient, Event, PromptRefusedError, PromptResult, Workflow
from host.server import ComfyServer
from host.tiny_models import TinyModels

pytestmark = pytest.mark.full


def pixels(client: ComfyClient, result: PromptResult) -> np.ndarray:
    """The one saved image as (height, width, 3) floats in 0..255."""
    (item,) = result.images()
    return np.asarray(client.image(item), dtype=np.float64)


def make(client: ComfyClient, graph: Workflow) -> np.ndarray:
    """Runs a graph that must succeed and returns its image."""
    return pixels(client, client.queue(graph).require_success())


@pytest.fixture(scope="module")
def plain_image(stock_server: ComfyServer, tiny_models: TinyModels) -> np.ndarray:
    """What the unmodified text-to-image graph gives."""
    return make(ComfyClient(stock_server.url), workflows.text_to_image(tiny_models))


@pytest.fixture(scope="module")
def uploaded(stock_server: ComfyServer) -> str:
    """An image in the server's input folder, half of it transparent."""
    picture = np.random.default_rng(0).integers(0, 255, (128, 128, 4), dtype=np.uint8)
    picture[:, :, 3] = 255
    picture[32:96, 32:96, 3] = 0
    return ComfyClient(stock_server.url).upload_image(Image.fromarray(picture), "hint.png")


def test_stock_graph_gives_an_image_with_progress_and_previews(
    stock_client: ComfyClient, tiny_models: TinyModels
) -> None:
    result = stock_client.queue(workflows.text_to_image(tiny_models, steps=3, seed=11)).require_success()
    image = pixels(stock_client, result)
    assert image.shape == (128, 128, 3)
    assert image.std() > 5, "a flat image could hide every error"
    assert [(each.value, each.max) for each in result.progress if each.node == "sampler"][-3:] == [
        (1, 3),
        (2, 3),
        (3, 3),
    ]
    assert len(result.previews) == 3
    assert result.node_s["sampler"] > 0


def test_the_same_graph_gives_the_same_image_and_another_prompt_another(
    stock_client: ComfyClient, tiny_models: TinyModels, plain_image: np.ndarray
) -> None:
    stock_client.free()
    result = stock_client.queue(workflows.text_to_image(tiny_models)).require_success()
    assert "sampler" not in result.cached, "a cached rerun proves nothing"
    again = pixels(stock_client, result)
    other = make(stock_client, workflows.text_to_image(tiny_models, prompt="a castle in the rain"))
    assert np.array_equal(again, plain_image)
    assert np.abs(other - plain_image).mean() > 1


@pytest.mark.parametrize("kind", ["schnell", "saved_by_comfyui", "lora_fused", "lora_diffusers", "fill"])
def test_every_tiny_model_loads_and_changes_the_image(
    kind: str, stock_client: ComfyClient, tiny_models: TinyModels, plain_image: np.ndarray, uploaded: str
) -> None:
    graph = workflows.text_to_image(tiny_models)
    if kind == "schnell":
        graph = workflows.schnell(tiny_models)
    elif kind == "saved_by_comfyui":
        graph["model"]["inputs"]["unet_name"] = tiny_models.dev_saved
    elif kind == "fill":
        graph = workflows.fill(tiny_models, uploaded)
    else:
        name = tiny_models.lora_fused if kind == "lora_fused" else tiny_models.lora_diffusers
        graph = workflows.with_lora(graph, name)
    assert np.abs(make(stock_client, graph) - plain_image).mean() > 1


@pytest.mark.parametrize("kind", ["xlabs", "union"])
def test_every_tiny_controlnet_loads_whole_and_changes_the_image(
    kind: str, stock_server: ComfyServer, tiny_models: TinyModels, plain_image: np.ndarray, uploaded: str
) -> None:
    client = ComfyClient(stock_server.url)
    name = tiny_models.controlnet_xlabs if kind == "xlabs" else tiny_models.controlnet_union
    graph = workflows.with_controlnet(workflows.text_to_image(tiny_models), tiny_models, name, uploaded)
    assert np.abs(make(client, graph) - plain_image).mean() > 1
    assert "missing controlnet keys" not in stock_server.log


def test_the_all_in_one_checkpoint_holds_the_same_model_as_the_plain_file(
    stock_client: ComfyClient, tiny_models: TinyModels, plain_image: np.ndarray
) -> None:
    graph = workflows.text_to_image(tiny_models)
    graph["model"] = {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": tiny_models.checkpoint}}
    assert np.array_equal(make(stock_client, graph), plain_image)


def test_a_graph_with_an_unknown_file_is_refused_readably(stock_client: ComfyClient, tiny_models: TinyModels) -> None:
    graph = workflows.text_to_image(tiny_models)
    graph["model"]["inputs"]["unet_name"] = "nowhere.safetensors"
    with pytest.raises(PromptRefusedError, match=r"node model \(UNETLoader\): Value not in list.*nowhere"):
        stock_client.queue(graph)


def test_cancel_interrupts_a_running_prompt(stock_client: ComfyClient, tiny_models: TinyModels) -> None:
    def cancel(event: Event) -> None:
        if event.type == "progress" and event.data["value"] == 2:
            stock_client.interrupt()

    result = stock_client.queue(workflows.text_to_image(tiny_models, steps=50, seed=3), on_event=cancel)
    assert result.status == "interrupted"
    assert result.progress[-1].value < 50


def test_a_stopped_server_is_gone_and_a_restarted_one_answers(tiny_models: TinyModels) -> None:
    with ComfyServer(models=tiny_models.models, pack=False) as server:
        first = server.pid
        server.restart()
        assert server.pid != first
        assert "UNETLoader" in ComfyClient(server.url).object_info("UNETLoader")
    assert not server.running()
    assert not server.base.exists()
