"""In auto mode a plan is chosen run by run, in a server whose CPU ranks are taken for known GPUs (LikeKnownGpus)."""

from typing import Any

import pytest
from rounding import ROUNDING

from host.client import ComfyClient, PromptResult, Workflow
from host.pack_workflows import latent_of, parallel, relative_error, saved_latent, to_latent
from host.tiny_models import TinyModels
from host.workflows import text_to_image

SMALL, LARGE = {"width": 64, "height": 80}, {"width": 256, "height": 256}


def known(graph: Workflow) -> Workflow:
    """The graph with a planner that knows its devices."""
    graph["known"] = {"class_type": "LikeKnownGpus", "inputs": {"sp_config": ["config", 0]}}
    graph["model"]["inputs"]["sp_config"] = ["known", 0]
    return graph


def stock_graph(tiny: TinyModels, *, cfg: float = 1.0, **settings: Any) -> Workflow:
    """A stock graph; its negative prompt is a text of its own, not of zeros."""
    graph = text_to_image(tiny, **settings)
    graph["blurry"] = {"class_type": "CLIPTextEncode", "inputs": {"clip": ["clip", 0], "text": "blurry"}}
    graph["sampler"]["inputs"] |= {"cfg": cfg, "negative": ["blurry", 0]}
    return graph


def measured(graph: Workflow, **plan: Any) -> Workflow:
    """The graph with our sampler and a planner that knows its devices, saving the latent. What tries found, the user's
    file keeps for other runs: here it has no say.
    """
    return known(to_latent(parallel(graph, sampler="ParallelFluxSampler", **{"tries": "off"} | plan)))


def report_of(result: PromptResult, node: str = "sampler") -> dict[str, Any]:
    (report,) = result.require_success().outputs[node]["parallel_dit"]
    return report


@pytest.mark.parametrize(
    ("asked", "plan", "work"),
    [
        (SMALL, "single", "20 image tokens, 256 text tokens, one conditioning at a time, one image, 2 steps"),
        (LARGE, "ring2", "256 image tokens, 256 text tokens, one conditioning at a time, one image, 2 steps"),
        (SMALL | {"cfg": 3.0}, "cfg2-ring1-uly1", "20 image tokens, 256 text tokens, prompt and negative, one image"),
        (SMALL | {"batch": 2}, "data2-ring1-uly1", "20 image tokens, 256 text tokens, one conditioning at a time, 2 "),
    ],
    ids=["small", "large", "cfg above 1", "batch"],
)
def test_each_kind_of_work_gets_its_plan_and_the_picture_is_stock_comfyuis(
    asked: dict[str, Any], plan: str, work: str, client: ComfyClient, tiny_models: TinyModels
) -> None:
    graph = stock_graph(tiny_models, seed=501, **asked)
    result = client.queue(measured(graph))
    ran = report_of(result)["plan"]
    assert (ran["name"], ran["chosen_for"][: len(work)]) == (plan, work)
    assert ran["reasons"][-1] == f"chosen for {ran['chosen_for']}"
    told = [text for node, text in result.texts if node == "sampler" and "step 2/2" in text]
    assert told[-1].splitlines()[1] == f"{plan}, chosen for {ran['chosen_for']}"
    assert relative_error(saved_latent(client, result), latent_of(client, graph)) <= ROUNDING


def listed(tiny: TinyModels, sizes: list[dict[str, int]]) -> Workflow:
    """A list of latents of these sizes, an image each."""
    graph = measured(stock_graph(tiny, seed=505, **sizes[0]))
    for number, size in enumerate(sizes):
        graph[f"latent {number}"] = {"class_type": "EmptySD3LatentImage", "inputs": {"batch_size": 1, **size}}
    items = {f"item_{number}": [f"latent {number}", 0] for number in range(len(sizes))}
    graph["latents"] = {"class_type": "MakeList", "inputs": items}
    graph["sampler"]["class_type"] = "ParallelFluxListSampler"
    graph["sampler"]["inputs"]["latent_image"] = ["latents", 0]
    return graph


@pytest.mark.parametrize(
    ("sizes", "at_once", "plan"), [([SMALL, SMALL], 2, "data2-ring1-uly1"), ([SMALL, LARGE], 1, "ring2")]
)
def test_images_of_one_kind_in_a_list_are_made_at_once(
    sizes: list[dict[str, int]], at_once: int, plan: str, client: ComfyClient, tiny_models: TinyModels
) -> None:
    report = report_of(client.queue(listed(tiny_models, sizes)))
    assert (report["sampling"]["at_once"], report["plan"]["name"]) == (at_once, plan)


def test_a_plan_of_the_users_is_told_of_a_quicker_one_that_the_planner_knows(
    client: ComfyClient, tiny_models: TinyModels
) -> None:
    """In the panel's state, for LARGE as auto has it; for the plan that auto would take, and without constants, not."""
    graph = stock_graph(tiny_models, seed=540, steps=3, width=272, height=256)
    client.queue(measured(graph)).require_success()  # a plan of auto's, for which the model is counted
    suggested = []
    for graph_of, ring in ((known, 2), (known, 1), (dict, 1)):
        graph["sampler"]["inputs"]["seed"] += 1
        asked = graph_of(to_latent(parallel(graph, sampler="ParallelFluxSampler", mode="manual", ring=ring)))
        asked["sampler"]["inputs"]["steps"] += len(suggested)  # no run is measured against another
        client.queue(asked).require_success()
        entry = [each for each in client.get("/parallel_dit/state")["reports"] if each["kind"] == "denoise"][-1]
        suggested.append(entry["summary"].get("suggestion"))
    assert [suggested[0], suggested[2]] == [None, None]
    assert (suggested[1]["plan"], suggested[1]["by"]) == ("ring2", "predicted")
    assert 1.1 < suggested[1]["factor"] < 2.1
