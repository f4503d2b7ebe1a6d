"""A sampler that is nearly linear: found by running the recurrence that it would be, on random numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from host.fetch import comfyui_path

pytestmark = pytest.mark.full

SCRIPT = Path(__file__).resolve().parents[1] / "host" / "trace_samplers.py"
SAID = "it is not linear in latents and denoised latents (off by"


def printed(what: str) -> list:
    command = [sys.executable, str(SCRIPT), str(comfyui_path()), what]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def said() -> dict[tuple[float, bool], str]:
    """By how much latents are bent, and whether only the model sees it: why the sampler is no recurrence."""
    return {(bend, hidden): reason for bend, hidden, reason in printed("--bent")}


def test_a_sampler_that_is_slightly_bent_is_refused_by_the_check_of_linearity_itself(
    said: dict[tuple[float, bool], str],
) -> None:
    assert said[0.0, False] == "", "unbent it is Euler"
    assert said[1e-4, False].startswith(SAID)
    assert said[1e-6, False].startswith(SAID)


def test_a_sampler_whose_last_step_hides_what_was_bent_is_refused_too(said: dict[tuple[float, bool], str]) -> None:
    """Its result is linear; what it gave the model was not."""
    assert said[0.0, True] == ""
    assert said[1e-4, True].startswith(SAID)
    assert said[1e-6, True].startswith(SAID)


def test_a_sampler_that_shows_something_else_is_refused() -> None:
    near, far = printed("--shown")
    assert near == ""
    assert far.startswith("its steps show something else than the denoised latent")
