"""Lists of prompts, seeds and latents: image k is the image of a single run, however many are made at once."""

from typing import Any

import pytest

from host.client import ComfyClient, Workflow
from host.pack_workflows import TOLERANCE, relative_error
from host.server import ComfyServer
from host.tiny_models import TinyModels
from parity.edits import LONG, Edit, plain
from parity.image_lists import DATA_2, differences, latents, listed, singles
from parity.runner import VISIBLE, prepare

PROMPTS = ("a castle in the rain", LONG, "a market in the sun", "a lighthouse", "an owl at night")
SIZES = ((64, 96), (64, 64), (96, 64), (64, 96), (80, 48))
SEEDS = (11, 12, 11, 14, 15)


@pytest.fixture(scope="module", autouse=True)
def pictures(comfy_server: ComfyServer, tiny_models: TinyModels) -> None:
    prepare(ComfyClient(comfy_server.url), tiny_models)


def single(number: int, *edits: Edit, **settings: Any) -> Workflow:
    """The stock graph of image `number`."""
    width, height = SIZES[number]
    graph = plain(prompt=PROMPTS[number], seed=SEEDS[number], width=width, height=height, **settings)
    for edit in edits:
        edit(graph)
    return graph


@pytest.mark.parametrize("sampler", ["dpmpp_2m_sde", pytest.param("euler_ancestral", marks=pytest.mark.full)])
def test_five_images_over_two_replicas_are_the_images_of_single_runs(sampler: str, client: ComfyClient) -> None:
    """Samplers that draw random numbers while they run."""
    graphs = [single(number, sampler=sampler, steps=3) for number in range(5)]
    result = client.queue(listed(graphs, **DATA_2))
    assert max(differences(latents(client, result, ["save"]), singles(client, graphs))) <= TOLERANCE
    values = [(each.value, each.max) for each in result.progress if each.node == "sampler"]
    assert values == [(value, 15) for value in range(1, 16)]
    assert len(result.previews) == 15
    report = result.report()
    assert (report["kind"], report["sampling"]["at_once"], len(report["images"])) == ("denoise", 2, 5)
    assert report["timings"]["calls"] == [2] * 6 + [1] * 3, "five images of three steps, two at once"
    assert [image["latent"] for image in report["images"][:2]] == [[1, 16, 12, 8], [1, 16, 8, 8]]


def test_one_for_all_is_written_once(client: ComfyClient) -> None:
    graphs = [single(0) for _ in range(3)]
    for number, graph in enumerate(graphs):
        graph["sampler"]["inputs"]["seed"] = number
    ours = listed(graphs, **DATA_2)
    for slot in ("positive", "negative", "latent_image"):
        ours[f"all {slot}"]["inputs"] = {"item_0": ours[f"all {slot}"]["inputs"]["item_0"]}
    found = latents(client, client.queue(ours), ["save"])
    assert max(differences(found, singles(client, graphs))) <= TOLERANCE
    assert relative_error(found[0], found[1]) > VISIBLE


def with_list(graph: Workflow, slot: str, items: list[Any]) -> Workflow:
    graph[f"all {slot}"]["inputs"] = {f"item_{number}": item for number, item in enumerate(items)}
    return graph


def refused(client: ComfyClient, graph: Workflow) -> str:
    """The first line of the one error, on our node, before a step ran."""
    result = client.queue(graph)
    assert (result.status, result.error_node, result.error_type) == ("error", "ParallelFluxListSampler", "ValueError")
    assert result.progress == []
    return result.error_message.splitlines()[0]


def test_lists_that_do_not_go_together_are_refused_by_name(client: ComfyClient) -> None:
    graphs = [single(number) for number in range(3)]
    line = refused(client, with_list(listed(graphs, **DATA_2), "seed", [1, 2]))
    for word in ("seed has 2", "positive has 3", "latent_image has 3", "make them equal, or give one"):
        assert word in line
    line = refused(client, with_list(listed(graphs, **DATA_2), "positive", []))
    assert "positive: the list is empty" in line


def test_a_latent_of_no_images_is_refused_by_number(client: ComfyClient) -> None:
    graph = listed([single(number) for number in range(3)], **DATA_2)
    graph["nothing"] = {"class_type": "EmptyBatch", "inputs": {}}
    graph["all latent_image"]["inputs"]["item_1"] = ["nothing", 0]
    line = refused(client, graph)
    assert "latent_image 2 of 3" in line
    assert "batch of 0 images" in line
