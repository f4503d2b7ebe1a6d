"""`make demo` gives an image, a table and an honest exit status."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from demo.run import TOLERANCE, Run, find, wrong
from host.client import PromptResult, Workflow
from host.server import PACK_ROOT


def finished(image: np.ndarray) -> Run:
    """A finished run with this image, as the verdict sees it."""
    return Run({}, PromptResult("id"), image)


@pytest.fixture
def picture() -> np.ndarray:
    """A picture with contrast, (16, 16, 3) in 0..255."""
    return np.random.default_rng(0).integers(0, 256, (16, 16, 3)).astype(np.float64)


def run_demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the demo as `make demo` does."""
    command = [sys.executable, "-m", "demo.run", *arguments]
    environment = {**os.environ, "PYTHONPATH": "tests"}
    return subprocess.run(
        command, cwd=PACK_ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False
    )


@pytest.mark.full
@pytest.mark.slow
def test_the_demo_ends_with_an_image_and_a_table_and_status_zero(tmp_path: Path) -> None:
    done = run_demo("--size", "192", "--steps", "2", "--output", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert Image.open(tmp_path / "flux_parallel.png").size == (192, 192)
    for row in ("end to end", "per step, rank 0", "VAE decode", "memory, rank 0", "image error against stock"):
        assert row in done.stdout
    assert "step 2 of 2" in done.stdout


@pytest.mark.full
def test_the_demo_fails_when_the_graph_fails(tmp_path: Path) -> None:
    done = run_demo("--devices", "cuda:99", "--output", str(tmp_path))
    assert done.returncode != 0
    assert "cuda:99" in done.stderr
    assert (tmp_path / "server.log").exists()


def test_an_image_off_by_rounding_alone_is_right(picture: np.ndarray) -> None:
    rounded = picture.copy()
    rounded[0, 0, 0] += 1
    assert wrong(finished(rounded), finished(picture), TOLERANCE["cpu"]) == ""


def test_a_wrong_image_is_called_wrong(picture: np.ndarray) -> None:
    noisy = picture + np.random.default_rng(1).normal(0, 0.1 * picture.std(), picture.shape)
    assert "relative error" in wrong(finished(noisy), finished(picture), TOLERANCE["cpu"])
    assert "relative error" in wrong(finished(picture * 0 + np.arange(16)[:, None, None]), finished(picture), 0.005)
    assert "stock ComfyUI's (16, 16, 3)" in wrong(finished(picture[:8]), finished(picture), TOLERANCE["cpu"])


def test_a_flat_image_is_called_wrong_even_when_stock_comfyui_agrees(picture: np.ndarray) -> None:
    flat = np.full_like(picture, 127.0)
    assert "flat" in wrong(finished(flat), finished(flat), TOLERANCE["cpu"])


def test_a_workflow_without_the_expected_node_is_refused() -> None:
    graph: Workflow = {"1": {"class_type": "UNETLoader", "inputs": {}}}
    with pytest.raises(ValueError, match="0 nodes of class SPConfig"):
        find(graph, "SPConfig")
