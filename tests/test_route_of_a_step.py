"""The route of a step, in ComfyUI's process and in a rank: as docs/design.md lists it.

Does not own how it is recorded (host/route.py). `python -m host.route COMFYUI FOLDER FILE` records it anew.
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

ROOT = Path(__file__).resolve().parents[1]
LISTED = re.compile(r"\d+\. `([\w/.]+): ([\w.<>]+)`")
WAN = "wan 2.1 t2v"

Route = list[tuple[str, str]]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Route:
    """Functions in order of their first calls in the last step of a KSampler over two ranks."""
    folder = tmp_path_factory.mktemp("route")
    file = write_families(folder / "models", only=[WAN]) / "diffusion_models" / BY_NAME[WAN].file
    command = [sys.executable, "-m", "host.route", str(comfyui_path()), str(folder), str(file)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    sides = json.loads((folder / "route.json").read_text())
    return [(file, name) for file, name in sides["host"] + sides["rank"]]


def listed() -> Route:
    """What docs/design.md has."""
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    return LISTED.findall(page.partition("\n## The route of a step")[2].partition("\n## ")[0])


def test_the_route_is_that_of_the_page(recorded: Route) -> None:
    assert [file for file, _ in listed()] == list(dict.fromkeys(file for file, _ in recorded))
    assert set(listed()) <= set(recorded)


def test_the_tracer_has_seen_a_rank_attend(recorded: Route) -> None:
    assert any("SequenceParallelAttention" in name for _, name in recorded)
