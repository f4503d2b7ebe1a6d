"""Runs of cases and checks in forked ranks; that of all cases, over 2 and over 3 ranks, which several files look at."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from host.fetch import comfyui_path

ROOT = Path(__file__).resolve().parents[2]


def run_ranks(module: str, folder: Path, numbers: str, *more: str, timeout_s: float = 280) -> Path:
    """Run one of this folder's modules that fork ranks; returns `folder`, in which it wrote."""
    command = [sys.executable, "-m", f"models.{module}", str(comfyui_path()), str(folder), numbers, *more]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


# Three share heads unevenly, which two seldom do; two alone are left to the full tier.
NUMBERS = [pytest.param(3), pytest.param(2, marks=pytest.mark.full)]


@pytest.fixture(scope="session", params=NUMBERS)
def ranks(request: pytest.FixtureRequest) -> int:
    """How many ranks share each case."""
    return int(request.param)


@pytest.fixture(scope="session")
def results(ranks: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that ranks.py wrote."""
    return run_ranks("ranks", tmp_path_factory.mktemp("hosted"), str(ranks))
