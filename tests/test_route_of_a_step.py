"""The route of a step, in ComfyUI's process and in a rank: as docs/design.md lists it.

Does not own how it is recorded (host/route.py). `python -m host.route COMFYUI FOLDER ENGINE=FILE...` records it anew.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from families.variants import BY_NAME, write_families
from host.fetch import comfyui_path
from host.tiny_models import write_flux

ROOT = Path(__file__).resolve().parents[1]
TITLES = {"flux": "Flux.1, by blocks of our own", "hosted": "every other model, by ComfyUI's own module"}
LISTED = re.compile(r"\d+\. `([\w/.]+): ([\w.<>]+)`")
WAN = "wan 2.1 t2v"

Route = list[tuple[str, str]]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Route]:
    """Functions by engine, in order of their first calls in the last step of a KSampler over two ranks."""
    folder = tmp_path_factory.mktemp("route")
    models = write_families(folder / "models", only=[WAN])
    files = {"flux": write_flux(folder / "flux.safetensors"), "hosted": models / "diffusion_models" / BY_NAME[WAN].file}
    words = [f"{engine}={path}" for engine, path in files.items()]
    command = [sys.executable, "-m", "host.route", str(comfyui_path()), str(folder), *words]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = {engine: json.loads((folder / f"{engine}.json").read_text()) for engine in files}
    return {engine: [(file, name) for file, name in sides["host"] + sides["rank"]] for engine, sides in found.items()}


def listed(engine: str) -> Route:
    """What docs/design.md has under the engine's title."""
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    section = page.partition(f"**{TITLES[engine]}**")[2].partition("\n**")[0].partition("\n## ")[0]
    return LISTED.findall(section)


@pytest.mark.parametrize("engine", TITLES)
def test_the_route_is_that_of_the_page(engine: str, recorded: dict[str, Route]) -> None:
    files = list(dict.fromkeys(file for file, _ in recorded[engine]))
    assert [file for file, _ in listed(engine)] == files
    assert set(listed(engine)) <= set(recorded[engine])


@pytest.mark.parametrize("engine", TITLES)
def test_the_tracer_has_seen_a_rank_attend(engine: str, recorded: dict[str, Route]) -> None:
    attention = {"flux": "SequenceAttention", "hosted": "SequenceParallelAttention"}[engine]
    assert any(attention in name for _, name in recorded[engine])
