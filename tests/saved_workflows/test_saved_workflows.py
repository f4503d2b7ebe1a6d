"""Every shipped template runs, and every workflow kept of a released version, but for files and sizes unchanged."""

import copy
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from families.variants import write_families
from host.client import ComfyClient, Workflow
from host.outcomes import OURS, StockFailsError
from host.server import PACK_ROOT, ComfyServer
from host.tiny_models import TinyModels
from tools.drawn_workflows import inputs_of

from .tiny_family import SMALL, family_of, file_of, tiny_family, variant_of
from .ui_format import NOTE, Titled, to_api

FOLDER = Path(__file__).parent
SAVED = sorted(FOLDER.glob("*/*.json"))
SHIPPED = sorted((PACK_ROOT / "example_workflows").glob("*.json"))  # as the editor saves them
API_WORKFLOWS = PACK_ROOT / "api_workflows"
QUEUED = sorted(API_WORKFLOWS.glob("*.json"))  # the same, as headless clients queue them
RELEASED_NODES = json.loads((FOLDER.parent / "comfy" / "released_nodes.json").read_text())
FILES = {
    "unet_name": "dev",
    "clip_name1": "clip_l",
    "clip_name2": "t5",
    "vae_name": "vae",
    "lora_name": "lora_fused",
    "control_net_name": "controlnet_union",
}
KINDS = {"flux1-fill-dev.safetensors": "fill"}  # where another model than dev is needed
LARGE = ("qwen_image", "z_image")  # whose tiny files are of 1.4 and 1.8 GB
# Run by the headless client, as API workflows: the one below, the other in comfy/test_nodes_example.py. That the
# template is the same graph is test_templates.py's.
HEADLESS = ("minimax_h3_t2v", "flux_parallel")


def each(paths: Iterable[Path]) -> list[Any]:
    """Parameters by name; of a family whose tiny file is large, in the full tier alone."""
    marked = [(path, [pytest.mark.full] if path.name.startswith(LARGE) else []) for path in paths]
    return [pytest.param(path, marks=marks, id=str(path.relative_to(path.parents[1]))) for path, marks in marked]


def read(path: Path, info: dict[str, Any]) -> Workflow:
    """A workflow of either format, as the server takes it."""
    saved = json.loads(path.read_text())
    return to_api(saved, info) if "nodes" in saved else saved


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


@pytest.mark.parametrize("path", each([*SAVED, *(path for path in SHIPPED if path.stem not in HEADLESS)]))
def test_a_workflow_runs(path: Path, request: pytest.FixtureRequest, client: ComfyClient, info: dict[str, Any]) -> None:
    graph = read(path, info)
    if family_of(graph) is None:
        graph = tiny(graph, request.getfixturevalue("tiny_models"))
    else:
        folder = write_families(request.getfixturevalue("family_models"), only=[variant_of(graph)])
        if not (folder / "diffusion_models" / file_of(graph)).exists():
            raise StockFailsError(f"this ComfyUI does not have the class of {family_of(graph)}")
        client, graph = request.getfixturevalue("hosted_client"), tiny_family(graph)
    images = client.queue(graph).require_success().images()
    assert images
    for item in images:  # not a number would be black all over; in sound the encoder refuses it
        assert item["filename"].endswith(".mp4") or np.ptp(np.asarray(client.image(item))) > 0


def test_the_headless_client_runs_a_video_with_sound(hosted_server: ComfyServer, tmp_path: Path) -> None:
    """Images as comfy/test_nodes_example.py fetches them."""
    name = HEADLESS[0]
    given = json.loads((API_WORKFLOWS / f"{name}.json").read_text())
    if lacks := types_in(API_WORKFLOWS / f"{name}.json") - {*ComfyClient(hosted_server.url).object_info(), *OURS}:
        raise StockFailsError(f"this ComfyUI has no {', '.join(lacks)}")
    graph = tmp_path / "small.json"
    graph.write_text(json.dumps(tiny_family(copy.deepcopy(given))))
    command = [sys.executable, "-I", "-S", str(API_WORKFLOWS / "headless_client.py"), str(graph)]
    command += ["--server", hosted_server.url, "--output", str(tmp_path / "out"), "--set", "sampler.steps=2"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    (path,) = (path for path in (tmp_path / "out").iterdir() if path.stem.startswith(name))
    with av.open(str(path)) as video:  # 22 pictures at 24 a second, of which the stand-in for the VAE makes 25
        (pictures,), (sound,) = video.streams.video, video.streams.audio
        assert (pictures.width, pictures.height, pictures.frames) == (128, 96, 25)
        assert sound.channels == 2
        assert float(sound.duration * sound.time_base) == pytest.approx(22 / 24, abs=0.1)
    reports = json.loads((tmp_path / "out" / "timing.json").read_text())
    assert reports["sampler"][0]["plan"]["ranks"] == 2
    assert reports["sampler"][0]["model"]["file"] == file_of(given)


@pytest.mark.parametrize("path", QUEUED, ids=lambda path: path.stem)
def test_a_workflow_of_a_family_names_a_published_file(path: Path) -> None:
    assert (family_of(json.loads(path.read_text())) is None) == path.stem.startswith("flux_")


def types_in(path: Path) -> set[str]:
    """The nodes of a workflow of either format."""
    saved = json.loads(path.read_text())
    if "nodes" in saved:
        return {node["type"] for node in saved["nodes"]} - {NOTE}
    return {node["class_type"] for node in saved.values()}


def test_every_released_node_is_in_a_saved_workflow() -> None:
    assert set(RELEASED_NODES) <= set().union(*map(types_in, SAVED))


def adds_defaults_alone(shipped: Titled, saved: Titled, info: dict[str, Any]) -> bool:
    """Whether one is the other, but for inputs that nodes got since, at their defaults."""
    if {title: kind for title, (kind, _) in shipped.items()} != {title: kind for title, (kind, _) in saved.items()}:
        return False
    for title, (kind, inputs) in shipped.items():
        defaults = {name: options.get("default") for name, _, options in inputs_of(info[kind]) if name in inputs}
        if inputs != defaults | saved[title][1]:
            return False
    return True


def test_every_shipped_workflow_comes_in_both_formats() -> None:
    assert {path.stem for path in SHIPPED} == {path.stem for path in QUEUED} != set()


def test_an_input_put_before_others_is_noticed_in_a_saved_workflow(info: dict[str, Any]) -> None:
    info = copy.deepcopy(info)
    order = info["SPConfig"]["input_order"]["required"]
    info["SPConfig"]["input_order"]["required"] = ["ring", *[name for name in order if name != "ring"]]
    saved = json.loads((FOLDER / "0.1.0" / "flux_parallel.ui.json").read_text())
    moved = next(node for node in to_api(saved, info).values() if node["class_type"] == "SPConfig")
    assert moved["inputs"]["ring"] == "auto"
