"""Lists of videos, and of a U-Net's images: each is that of a stock run of its own, and two are made at once."""

import pytest
from rounding import ROUNDING

from host.client import ComfyClient, Workflow
from parity.image_lists import DATA_2, differences, latents, listed, singles

from .variants import BY_NAME

WAN = tuple({"width": width, "height": 64, "length": length} for width, length in ((64, 17), (64, 9), (96, 5)))
KOALA = tuple({"width": width, "height": height} for width, height in ((112, 80), (64, 64), (80, 112)))


def single(name: str, number: int, size: dict[str, int]) -> Workflow:
    """The stock graph of image `number`: texts, seed and size are its own."""
    graph = BY_NAME[name].graph(cfg=3.0, seed=20 + number, steps=3)
    graph["sampler"]["inputs"]["sampler_name"] = "dpmpp_2m_sde"  # which draws random numbers while it runs
    for text in ("positive", "negative"):
        graph[text]["inputs"]["seed"] += 10 * number
    graph["positive"]["inputs"]["tokens"] += 2 * number
    graph["latent"]["inputs"] |= size
    return graph


@pytest.mark.parametrize(("name", "sizes"), [("wan 2.1 t2v", WAN), ("sdxl koala", KOALA)])
def test_three_runs_over_two_replicas_are_single_runs(
    name: str, sizes: tuple[dict[str, int], ...], hosted_client: ComfyClient
) -> None:
    graphs = [single(name, number, size) for number, size in enumerate(sizes)]
    result = hosted_client.queue(listed(graphs, **DATA_2))
    found, stock = latents(hosted_client, result, ["save"]), singles(hosted_client, graphs)
    assert [each.shape for each in found] == [each.shape for each in stock]
    assert max(differences(found, stock)) <= ROUNDING
    report = result.report()
    assert (report["sampling"]["at_once"], len(report["images"])) == (2, 3)
    assert len(report["timings"]["calls"]) == 6, "nine steps in three runs, two at once"
