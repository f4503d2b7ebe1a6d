"""The shipped workflow and the shipped client, as a headless user runs them."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from PIL import Image

from host.client import Workflow
from host.server import PACK_ROOT, ComfyServer
from host.tiny_models import TinyModels

CLIENT = PACK_ROOT / "api_workflows" / "headless_client.py"
WORKFLOW = PACK_ROOT / "api_workflows" / "flux_parallel.json"


def tiny_workflow(tiny: TinyModels, folder: Path) -> Path:
    """The shipped workflow with the tiny files' names and the test-only text encoders put in."""
    graph: Workflow = json.loads(WORKFLOW.read_text())
    graph["clip"]["class_type"] = "TinyDualCLIPLoader"
    graph["clip"]["inputs"] |= {"clip_name1": tiny.clip_l, "clip_name2": tiny.t5}
    graph["vae"]["inputs"]["vae_name"] = tiny.vae
    path = folder / "tiny.json"
    path.write_text(json.dumps(graph))
    return path


def headless(server: ComfyServer, workflow: Path, folder: Path, **settings: Any) -> subprocess.CompletedProcess[str]:
    """Run the client isolated from this environment's packages, where a proxy is named that nobody is."""
    command = [
        sys.executable,
        "-I",
        "-S",
        "-X",
        "utf8=0",
        str(CLIENT),
        str(workflow),
        "--server",
        server.url,
        "--output",
        str(folder),
    ]
    for name, value in settings.items():
        command += ["--set", f"{name.replace('__', '.')}={value}"]
    environment = {**os.environ, "http_proxy": "http://127.0.0.1:9", "no_proxy": ""}
    environment |= {"LC_ALL": "C"}  # as on Windows, text is not UTF-8 unless it is asked for
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)


def small(tiny: TinyModels) -> dict[str, Any]:
    sizes = {"latent__width": 256, "latent__height": 192, "sampler__steps": 2}
    return sizes | {"model__unet_name": tiny.dev, "config__devices": "cpu:2"}


def test_the_headless_client_fetches_the_image_and_the_timing(
    comfy_server: ComfyServer, tiny_models: TinyModels, tmp_path: Path
) -> None:
    workflow = tiny_workflow(tiny_models, tmp_path)
    graph = json.loads(workflow.read_text())
    show = {"class_type": "ShowTimingReport", "inputs": {"timing": ["sampler", 1], "filename_prefix": "shown"}}
    workflow.write_text(json.dumps(graph | {"show": show}))
    run = headless(comfy_server, workflow, tmp_path / "out", **small(tiny_models))
    assert run.returncode == 0, run.stdout + run.stderr
    assert "sampler: 2 of 2" in run.stdout
    assert "cache" not in run.stdout
    (image,) = (tmp_path / "out").glob("flux_parallel*.png")
    (chart,) = (tmp_path / "out").glob("shown*.png")
    assert Image.open(chart).width == 1300
    (shown,) = (tmp_path / "out").glob("shown*.json")
    assert json.loads(shown.read_text())[0]["kind"] == "denoise"
    again = headless(comfy_server, workflow, tmp_path / "again", **small(tiny_models))
    assert "show: served from the server's cache, its times are of an earlier prompt" in again.stdout
    assert Image.open(image).size == (256, 192)
    reports = json.loads((tmp_path / "out" / "timing.json").read_text())
    assert reports["sampler"][0]["plan"]["name"] == "uly2"
    assert reports["decode"][0]["vae"]["decode_s"] > 0


def test_the_headless_client_tells_an_error_and_a_refusal_apart(
    comfy_server: ComfyServer, tiny_models: TinyModels, tmp_path: Path
) -> None:
    workflow = tiny_workflow(tiny_models, tmp_path)
    broken = tiny_models.diffusion_model("broken.safetensors")
    broken.write_bytes(b"no model" * 64)
    failed = headless(comfy_server, workflow, tmp_path, **(small(tiny_models) | {"model__unet_name": broken.name}))
    broken.unlink()
    assert failed.returncode == 1
    assert "ParallelModelLoader (node model)" in failed.stdout
    assert "not a safetensors file" in failed.stdout
    refused = headless(comfy_server, workflow, tmp_path, **(small(tiny_models) | {"config__devices": "cuda:63"}))
    assert refused.returncode == 2
    assert "refused: SPConfig (node config): " in refused.stdout
    assert "device cuda:63 does not exist" in refused.stdout
    graph = json.loads(workflow.read_text())
    release = {"class_type": "ReleaseParallelPool", "inputs": {}}
    # what Windows' Notepad saves, for a server of another computer, read where no character beyond ASCII is usual
    workflow.write_text(json.dumps(graph | {"é": release}, ensure_ascii=False), encoding="utf-8-sig")
    in_part = headless(comfy_server, workflow, tmp_path, **(small(tiny_models) | {"config__devices": "cuda:63"}))
    assert in_part.returncode == 2, "Release alone has run"
    assert in_part.stdout.startswith("refused: SPConfig (node config): "), in_part.stdout
    assert in_part.stdout.endswith("the prompt ended, and no image or file came of it\n")


@pytest.mark.parametrize(
    ("folder", "server", "said"),
    [
        ("api_workflows", "http://127.0.0.1:1", "no ComfyUI answers at http://127.0.0.1:1"),
        ("example_workflows", "http://127.0.0.1:1", "is no workflow in API form"),
        ("api_workflows", "https://127.0.0.1:1", "only http:// is spoken; use ssh -L 8188:127.0.0.1:8188 MACHINE"),
    ],
)
def test_the_headless_client_says_what_it_lacks(folder: str, server: str, said: str) -> None:
    command = [sys.executable, str(CLIENT), str(PACK_ROOT / folder / "z_image_turbo.json")]
    run = subprocess.run([*command, "--server", server], capture_output=True, text=True, check=False)
    assert (run.returncode, said in run.stdout + run.stderr) == (2, True), run.stderr


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        (TimeoutError("timed out"), "nothing was heard for 2 s, and the prompt may still run; raise --timeout\n"),
        (ConnectionResetError("reset"), "the connection to http://here was lost (reset); the prompt may still run\n"),
    ],
)
def test_the_headless_client_says_that_a_server_fell_silent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lost: OSError, said: str
) -> None:
    client = headless_client()
    for name in ("WebSocket", "Server"):
        monkeypatch.setattr(client, name, Mock(return_value=Mock(url="http://here")))
    client.Server.return_value.queue.return_value = ("1", "")
    monkeypatch.setattr(client, "follow", Mock(side_effect=lost))
    graph = str(PACK_ROOT / "api_workflows" / "z_image_turbo.json")
    monkeypatch.setattr(sys, "argv", ["client", graph, "--server", "http://here", "--timeout", "2"])
    assert (client.main(), capsys.readouterr().out) == (1, said)


def headless_client() -> Any:
    spec = importlib.util.spec_from_file_location("headless_client", CLIENT)
    assert spec is not None and spec.loader is not None
    client = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(client)
    return client


def test_what_a_server_calls_its_files_leads_to_one_folder_and_no_two_are_alike() -> None:
    client = headless_client()
    said = [
        ("", "a.png"),
        ("day", "a.png"),
        ("", "../../b.png"),
        ("..", ".."),
        ("c:\\x", "c:\\d.png"),
        ("", "timing.json"),
    ]
    items = [{"subfolder": subfolder, "filename": filename} for subfolder, filename in said]
    assert client.local_names(items) == ["a.png", "day_a.png", "b.png", "unnamed", "d.png", "6_timing.json"]
