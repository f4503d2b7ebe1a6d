"""A sampler that is nearly linear: found by running the recurrence that it would be, on random numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

SCRIPT = Path(__file__).resolve().parents[1] / "host" / "trace_samplers.py"
SAID = "it is not linear in latents and denoised latents (off by"


@pytest.fixture(scope="module")
def printed(in_comfyui) -> Callable[[str], list]:
    """What the script prints of what it is asked."""
    return lambda what: json.loads(in_comfyui(SCRIPT, what)[-1])


@pytest.fixture(scope="module")
def said(printed) -> dict[tuple[float, bool], str]:
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


def test_a_sampler_that_shows_something_else_is_refused(printed) -> None:
    near, far = printed("--shown")
    assert near == ""
    assert far.startswith("its steps show something else than the denoised latent")
