"""A short version of `make endurance`: nothing is left over by a prompt, whatever model and plan came before."""

from __future__ import annotations

import pytest

from host.client import ComfyClient, Workflow
from host.server import ComfyServer
from host.tiny_models import TinyModels

from .run import MOST_GROWN, WARM_UP, Held, growth, prompt, run

RELEASE: Workflow = {"end": {"class_type": "ReleaseParallelPool", "inputs": {}}}


@pytest.mark.full
def test_models_and_plans_in_turn_leave_nothing_over(
    client: ComfyClient, comfy_server: ComfyServer, tiny_models: TinyModels
) -> None:
    client.queue(RELEASE).require_success()
    found = run(comfy_server, tiny_models, 2 * WARM_UP)
    grown = growth(found)
    assert all(by <= MOST_GROWN[name] for name, by in grown.items()), grown
    assert [each.processes for each in found] == [2] * len(found)


def test_the_prompts_are_every_mix_of_model_and_plan(tiny_models: TinyModels) -> None:
    mixes = set()
    for number in range(WARM_UP):
        inputs = prompt(tiny_models, number)
        config = inputs["config"]["inputs"]
        mixes.add((inputs["model"]["inputs"]["unet_name"], config["ulysses"], config["ring"]))
    assert len(mixes) == 4


def test_a_leak_of_one_thread_a_prompt_would_be_seen() -> None:
    leaking = [Held(500.0, 300.0, 40 + number, 90, 2) for number in range(2 * WARM_UP)]
    assert growth(leaking)["threads"] > MOST_GROWN["threads"]
