"""Every workflow saved from a released version runs, in both formats, with nothing changed but files and sizes."""

from __future__ import annotations

import json
import subprocess
import sys
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
SMALL = {"width": 128, "height": 96, "length": 9, "steps": 1, "warmup": 0, "runs": 1}
FILES = {
    "unet_name": "dev",
    "clip_name1": "clip_l",
    "clip_name2": "t5",
    "vae_name": "vae",
    "lora_name": "lora_fused",
    "control_net_name": "controlnet_union",
}
KINDS = {"flux1-fill-dev.safetensors": "fill"}  # where another model than dev is needed
# A family's file, the width of its text, and what a VAE makes of pixels: its channels and how many pictures a frame.
FAMILIES = {
    "wan2.1_t2v_1.3B_fp16.safetensors": ("tiny_wan_t2v.safetensors", 48, 16, 4),
    "qwen_image_fp8_e4m3fn.safetensors": ("tiny_wan_t2v.safetensors", 48, 16, 1),  # its own tiny file is of 1.4 GB
}


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


def family_of(graph: Workflow) -> str | None:
    """The published file of a family that this graph loads; None for what the session's server has."""
    names = {node["inputs"].get("unet_name") for node in graph.values()}
    return next((name for name in FAMILIES if name in names), None)


def tiny_family(graph: Workflow) -> Workflow:
    """The same graph with the family's tiny file, encoders without weights, and few pixels and steps."""
    file, width, channels, temporal = FAMILIES[family_of(graph) or ""]
    for node in graph.values():
        node["inputs"] |= {name: value for name, value in SMALL.items() if name in node["inputs"]}
        if "unet_name" in node["inputs"]:
            node["inputs"]["unet_name"] = file
        elif node["class_type"] == "CLIPLoader":
            node |= {"class_type": "RandomTextEncoder", "inputs": {"tokens": 13, "width": width}}
        elif node["class_type"] == "VAELoader":
            sizes = {"channels": channels, "spatial": 8, "temporal": temporal}
            node |= {"class_type": "RandomVAE", "inputs": sizes}
        elif node["class_type"] == "SPConfig":
            node["inputs"] |= {"devices": "cpu:2"}
    return graph


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
        elif node["class_type"] == "FluxKontextImageScale":  # to about a million pixels, whatever it is given
            node["class_type"], sizes = "ImageScale", {"width": SMALL["width"], "height": SMALL["height"]}
            given |= {"upscale_method": "area", "crop": "center", **sizes}
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
def test_a_saved_workflow_runs(name: str, request: pytest.FixtureRequest, client: ComfyClient) -> None:
    graph = read(FOLDER / name, client)
    if family_of(graph) is None:
        graph = tiny(graph, request.getfixturevalue("tiny_models"))
    else:
        client, graph = request.getfixturevalue("hosted_client"), tiny_family(graph)
    assert client.queue(graph).require_success().images()


@pytest.mark.parametrize(
    "path", [path for path in QUEUED if not path.stem.startswith("flux")], ids=lambda path: path.stem
)
def test_the_headless_client_runs_the_example_of_a_family(
    path: Path, hosted_server: ComfyServer, tmp_path: Path
) -> None:
    graph = tmp_path / path.name
    graph.write_text(json.dumps(tiny_family(json.loads(path.read_text()))))
    command = [sys.executable, "-I", "-S", str(PACK_ROOT / "examples" / "headless_client.py"), str(graph)]
    command += ["--server", hosted_server.url, "--output", str(tmp_path / "out"), "--set", "sampler.steps=2"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    (picture,) = (each for each in (tmp_path / "out").iterdir() if each.suffix in (".png", ".webp"))
    with Image.open(picture) as image:
        assert image.size == (128, 96)
        # 9 pictures in 3 latent frames, whose pictures are alike; WebP keeps one of those
        assert getattr(image, "n_frames", 1) == (3 if "length" in graph.read_text() else 1)
    reports = json.loads((tmp_path / "out" / "timing.json").read_text())
    assert reports["sampler"][0]["plan"]["ranks"] == 2
    assert reports["sampler"][0]["model"]["file"] == FAMILIES[family_of(json.loads(path.read_text())) or ""][0]


@pytest.mark.parametrize("path", QUEUED, ids=lambda path: path.stem)
def test_an_example_of_a_family_names_a_published_file(path: Path) -> None:
    assert (family_of(json.loads(path.read_text())) is None) == path.stem.startswith("flux")


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
