"""A rank that loads a model of ComfyUI's touches its own device and no other: a context costs memory on each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from families.files import write_model_files
from families.wan import wan_file
from gpu.pretend_cuda.library import library
from host.fetch import comfyui_path

GPU = Path(__file__).resolve().parent
ROOT = GPU.parents[1]


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Wan."""
    library()
    (path,) = write_model_files(tmp_path_factory.mktemp("wan"), [wan_file("one_device", "t2v", heads=5, seed=21)])
    return path


def touched(model: Path, *words: str) -> list[int]:
    """The devices that a process of its own touched."""
    command = [sys.executable, str(GPU / "touched_devices.py"), str(comfyui_path()), str(model), *words]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{GPU}", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return list(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.full
def test_a_rank_touches_its_own_device_alone(wan: Path) -> None:
    assert touched(wan, "1") == [1]


@pytest.mark.full
def test_without_a_choice_before_the_import_it_would_touch_another(wan: Path) -> None:
    assert touched(wan, "1", "unselected") == [0, 1]
