"""Every workflow saved from a released version runs, in both formats, with nothing changed but files and sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from host.client import ComfyClient, Workflow
from host.server import PACK_ROOT, ComfyServer
from host.tiny_models import TinyModels

from .ui_format import to_api

FOLDER = Path(__file__).parent
SAVED = sorted(str(path.relative_to(FOLDER)) for path in FOLDER.glob("*/*.json"))
SHIPPED = sorted((PACK_ROOT / "example_workflows").glob("*.json"))  # as the editor saves them
QUEUED = sorted((PACK_ROOT / "examples").glob("*.json"))  # the same, as headless clients queue them
RELEASED_NODES = json.loads((FOLDER.parent / "comfy" / "released_nodes.json").read_text())
SMALL = {"width": 128, "height": 96, "steps": 1}
FILES = {
    "unet_name": "dev",
    "clip_name1": "clip_l",
    "clip_name2": "t5",
    "vae_name": "vae",
    "lora_name": "lora_fused",
    "control_net_name": "controlnet_union",
}
KINDS = {"flux1-fill-dev.safetensors": "fill"}  # where another model than dev is needed


@pytest.fixture(scope="module", autouse=True)
def example_image(comfy_server: ComfyServer) -> None:
    """The image that every new ComfyUI has in its input folder; ours has a hole to fill."""
    picture = np.random.default_rng(0).integers(0, 255, (256, 256, 4), dtype=np.uint8)
    picture[:, :, 3] = 255
    picture[64:192, 64:192, 3] = 0
    ComfyClient(comfy_server.url).upload_image(Image.fromarray(picture), "example.png")


def read(path: Path, client: ComfyClient) -> Workflow:
    """A workflow of either format, as the server takes it."""
    saved = json.loads(path.read_text())
    return to_api(saved, client.object_info()) if "nodes" in saved else saved


def tiny(graph: Workflow, models: TinyModels) -> Workflow:
    """The same graph with the tiny files, the text encoders only tests have, and few pixels and steps."""
    for node in graph.values():
        given = node["inputs"]
        given |= {
            name: getattr(models, KINDS.get(given[name], field)) for name, field in FILES.items() if name in given
        }
        given |= {name: value for name, value in SMALL.items() if name in given}
        if node["class_type"] == "DualCLIPLoader":
            node["class_type"] = "TinyDualCLIPLoader"
    return graph


def by_title(graph: Workflow) -> dict[str, Any]:
    """A graph without its ids: class and inputs by the node's title, links by the title they come from."""
    titles = {name: node["_meta"]["title"] for name, node in graph.items()}
    assert len(set(titles.values())) == len(titles)
    found = {}
    for name, node in graph.items():
        inputs = {
            key: [titles[value[0]], value[1]] if isinstance(value, list) else value
            for key, value in node["inputs"].items()
        }
        found[titles[name]] = (node["class_type"], inputs)
    return found


@pytest.mark.parametrize("name", SAVED)
def test_a_saved_workflow_runs(name: str, client: ComfyClient, tiny_models: TinyModels) -> None:
    result = client.queue(tiny(read(FOLDER / name, client), tiny_models)).require_success()
    assert result.images()


def test_every_released_node_is_in_a_saved_workflow(client: ComfyClient) -> None:
    used = {node["class_type"] for name in SAVED for node in read(FOLDER / name, client).values()}
    assert set(RELEASED_NODES) <= used


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_a_shipped_workflow_is_kept_as_it_was_released(path: Path, client: ComfyClient) -> None:
    shipped = by_title(read(path, client))
    assert any(shipped == by_title(read(FOLDER / name, client)) for name in SAVED)


def test_every_shipped_workflow_comes_in_both_formats_and_they_agree(client: ComfyClient) -> None:
    interface, queued = ({path.stem: path for path in paths} for paths in (SHIPPED, QUEUED))
    assert set(interface) == set(queued) != set()
    for name, path in interface.items():
        drawn, given = by_title(read(path, client)), by_title(read(queued[name], client))
        assert drawn.keys() == given.keys()
        for title, (class_type, inputs) in given.items():
            assert drawn[title] == (class_type, drawn[title][1] | inputs)  # the editor adds optional widgets


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_every_shipped_workflow_has_a_picture_for_the_template_browser(path: Path) -> None:
    with Image.open(path.with_suffix(".jpg")) as picture:
        assert picture.width >= 300
        assert path.with_suffix(".jpg").stat().st_size < 60_000


def test_an_input_put_before_others_is_noticed_in_a_saved_workflow(client: ComfyClient) -> None:
    info = client.object_info()
    order = info["SPConfig"]["input_order"]["required"]
    info["SPConfig"]["input_order"]["required"] = ["ring", *[name for name in order if name != "ring"]]
    saved = json.loads((FOLDER / "0.1.0" / "flux_parallel.ui.json").read_text())
    moved = next(node for node in to_api(saved, info).values() if node["class_type"] == "SPConfig")
    assert moved["inputs"]["ring"] == "auto"
