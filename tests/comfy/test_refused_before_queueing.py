"""Values that cannot work are refused when a prompt is sent, in one sentence of ours, and nothing is queued."""

import re
from typing import Any

import pytest

from host import workflows
from host.client import ComfyClient, PromptRefusedError, Workflow
from host.pack_workflows import parallel, to_latent
from host.tiny_models import TinyModels

# SP Config's inputs, and what its sentence names. Of every other value: runtime/test_plan.py and test_devices.py.
REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "degrees against devices": (
        {"devices": "cpu:2", "mode": "manual", "ulysses": 2, "cfg": 2},
        ("ulysses=2,cfg=2", "cpu:2", "make the product of the degrees 2 or less"),
    ),
    "shards without peers": (
        {"devices": "cpu:2", "mode": "manual", "data": 2, "weights": "sharded"},
        ("weights=sharded", "one rank", "use weights=replicated"),
    ),
    "no such device": ({"devices": "cuda:63"}, ("cuda:63", "does not exist", "this machine has")),
    "a number that is none": ({"mode": "manual", "ulysses": "many"}, ("ulysses='many' is not a whole number",)),
}


def refused(client: ComfyClient, graph: Workflow) -> dict[str, Any]:
    """The errors of each node of a prompt that must be refused; nothing of it is queued."""
    before = client.get("/prompt")["exec_info"]["queue_remaining"]
    with pytest.raises(PromptRefusedError) as refusal:
        client.queue(graph)
    assert client.get("/prompt")["exec_info"]["queue_remaining"] == before == 0
    return refusal.value.body["node_errors"]


@pytest.mark.parametrize("what", REFUSED)
def test_sp_config_refuses_before_queueing_in_one_sentence(
    what: str, client: ComfyClient, tiny_models: TinyModels
) -> None:
    config, says = REFUSED[what]
    nodes = refused(client, to_latent(parallel(workflows.text_to_image(tiny_models), **config)))
    assert list(nodes) == ["config"]
    (sentence,) = [each["details"] for each in nodes["config"]["errors"] if each["type"] == "custom_validation_failed"]
    assert [part for part in says if part not in sentence.splitlines()[0]] == [], sentence


def linked(graph: Workflow, name: str, text: str) -> Workflow:
    """The graph with a text input of SP Config from another node."""
    graph["text"] = {"class_type": "PrimitiveString", "inputs": {"value": text}}
    graph["config"]["inputs"][name] = ["text", 0]
    return graph


def test_a_value_of_another_node_is_judged_when_it_is_known(client: ComfyClient, tiny_models: TinyModels) -> None:
    graph = to_latent(parallel(workflows.text_to_image(tiny_models, width=64, height=64, steps=1)))
    client.queue(linked(graph, "devices", "cpu:2")).require_success()
    result = client.queue(linked(graph, "devices", "tpu:0"))
    assert (result.status, result.error_node) == ("error", "SPConfig")
    assert result.error_message.startswith("device 'tpu:0' is unknown")
    graph["config"]["inputs"]["devices"] = "tpu:0"
    graph["count"] = {"class_type": "PrimitiveInt", "inputs": {"value": 2}}
    graph["config"]["inputs"]["ulysses"] = ["count", 0]
    (error,) = refused(client, graph)["config"]["errors"]
    assert error["details"] == "devices - device 'tpu:0' is unknown; use all, a count, cuda:N or cpu:N"


def test_memory_on_each_device_is_told_before_anything_is_loaded(client: ComfyClient, tiny_models: TinyModels) -> None:
    """By the route that SP Config's text on the page asks, with the weights on the device and in host memory."""
    asked = {"mode": "manual", "devices": "cpu:2", "ulysses": "2", "unet_name": tiny_models.dev}
    whole, offloaded = (
        client.get("/parallel_dit/plan", **asked, weights=weights)["memory"] for weights in ("replicated", "offloaded")
    )
    file_bytes = tiny_models.diffusion_model(tiny_models.dev).stat().st_size
    assert 0.9 * file_bytes < whole["device"] < whole["total"]
    assert whole["host"] == 0 < 0.5 * file_bytes < offloaded["host"] < file_bytes, "of all ranks of the machine"
    assert offloaded["device"] < whole["device"] and not whole["fullest"]
    equal, unequal = (
        client.get("/parallel_dit/plan", **asked, weights="sharded", shares=shares)["memory"]
        for shares in ("equal", "1, 9")
    )
    assert unequal["device"] > equal["device"] and (equal["fullest"], unequal["fullest"]) == ("", "cpu:1")
    graph = workflows.text_to_image(tiny_models, width=64, height=64, steps=1)
    result = client.queue(to_latent(parallel(graph, shares="7, 7")))  # as no test before, so that the loader runs
    told = [text for node, text in result.require_success().texts if node == "model"]
    assert any(re.search(r"(weights|memory): about \d.*GB on each device", text) for text in told), told
