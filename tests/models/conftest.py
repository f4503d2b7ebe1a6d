"""The one run of all cases and checks, over 2 and over 3 ranks, that several files' tests look at."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from host.fetch import comfyui_path

ROOT = Path(__file__).resolve().parents[2]


# Three share heads unevenly, which two seldom do; two alone are left to the full tier.
NUMBERS = [pytest.param(3), pytest.param(2, marks=pytest.mark.full)]


@pytest.fixture(scope="session", params=NUMBERS)
def ranks(request: pytest.FixtureRequest) -> int:
    """How many ranks share each case."""
    return int(request.param)


@pytest.fixture(scope="session")
def results(ranks: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that ranks.py wrote."""
    folder = tmp_path_factory.mktemp("hosted")
    command = [sys.executable, "-m", "models.ranks", str(comfyui_path()), str(folder), str(ranks)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder
