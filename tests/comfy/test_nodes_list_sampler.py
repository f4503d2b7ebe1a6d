"""Lists of prompts, seeds and latents: image k is the image of a single run, however many are made at once."""

from typing import Any

import pytest
from rounding import ROUNDING

from host.client import ComfyClient, Workflow
from host.pack_workflows import relative_error
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
    assert max(differences(latents(client, result, ["save"]), singles(client, graphs))) <= ROUNDING
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
    assert max(differences(found, singles(client, graphs))) <= ROUNDING
    assert relative_error(found[0], found[1]) > VISIBLE
