"""Every sampler of ComfyUI becomes a program that samples alike, or says why it cannot."""

import json
from pathlib import Path

import pytest
from rounding import ROUNDING

pytestmark = pytest.mark.full  # all samplers

# fp32 sums in another order, over up to 24 steps; the sampler's own sigmas are in fp32 too
NOT_LINEAR = "it is not linear in latents and denoised latents (off by"
SCRIPT = Path(__file__).resolve().parents[1] / "host" / "trace_samplers.py"


@pytest.fixture(scope="module")
def found(in_comfyui) -> dict[str, dict]:
    return json.loads(in_comfyui(SCRIPT)[-1])


def left_to_the_host(name: str) -> bool:
    """cfg++ reads the negative side apart; dpm_adaptive chooses its steps by what the model says."""
    sampler = name.partition(",")[0]
    return sampler.endswith("_cfg_pp") or sampler == "dpm_adaptive"


def test_every_sampler_is_a_program_or_says_why_not(found: dict[str, dict]) -> None:
    assert len(found) > 100
    assert {name for name, values in found.items() if "reason" in values} == set(filter(left_to_the_host, found))


def test_recurrences_sample_as_their_samplers_do(found: dict[str, dict]) -> None:
    wrong = {name: values["error"] for name, values in found.items() if not values.get("error", 0.0) <= ROUNDING}
    assert not wrong


def test_tracing_leaves_the_random_state_alone_and_drawing_noise_moves_it_as_the_sampler_does(
    found: dict[str, dict],
) -> None:
    assert any(values.get("noisy") for values in found.values())
    for name, values in found.items():
        assert values.get("random_state_kept", True), name
        if values.get("noisy"):
            assert values["random_state_as_sampler"], name


def test_sigmas_are_left_as_the_sampler_leaves_them(found: dict[str, dict]) -> None:
    assert all(values.get("sigmas_as_sampler", True) for values in found.values())


def test_recurrences_fit_into_a_message(found: dict[str, dict]) -> None:
    assert max(values.get("json_bytes", 0) for values in found.values()) < 64 * 1024


def test_reasons_say_what_the_sampler_does(found: dict[str, dict]) -> None:
    assert "changes the model's options" in found["dpmpp_2m_cfg_pp, simple 12"]["reason"]
    assert "calls the model" in found["dpm_adaptive, simple 12"]["reason"]


def test_options_that_only_the_sampler_has_are_looked_at(in_comfyui) -> None:
    """As a wrapper around the sampler may put there: the loop in the workers must not pass over them."""
    plain, after_cfg, both_sides = json.loads(in_comfyui(SCRIPT, "--options")[-1])
    assert plain == ["", "positive"]
    assert after_cfg[0] == "a node changes what comes after cfg"
    assert both_sides == ["", "positive", "negative"]


def test_a_sampler_that_is_slightly_bent_is_refused_even_where_the_model_alone_sees_it(in_comfyui) -> None:
    """Where its last step hides what was bent, its result is linear; what it gave the model was not."""
    said = {(bend, hidden): reason for bend, hidden, reason in json.loads(in_comfyui(SCRIPT, "--bent")[-1])}
    assert {bend for bend, _ in said} == {0.0, 1e-4, 1e-6} and len(said) == 6
    for (bend, _), reason in said.items():
        assert reason.startswith(NOT_LINEAR) if bend else reason == ""


def test_a_sampler_that_shows_something_else_is_refused(in_comfyui) -> None:
    near, far = json.loads(in_comfyui(SCRIPT, "--shown")[-1])
    assert near == ""
    assert far.startswith("its steps show something else than the denoised latent")
