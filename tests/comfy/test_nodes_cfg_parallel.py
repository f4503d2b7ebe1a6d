"""CFG and data parallel: what stock ComfyUI runs one after the other goes to the pool in one request, and is equal."""

from typing import Any

import pytest
from rounding import ROUNDING

from host.client import ComfyClient, Workflow
from host.pack_workflows import relative_error, saved_latent
from host.server import ComfyServer
from host.tiny_models import TinyModels
from parity.edits import HERE, LONG, Edit, add, guided, on, on_model, on_positive, prompt
from parity.graphs import Graph, of
from parity.runner import parallelized, prepare

CFG_2 = {"devices": "cpu:2", "cfg": 2}
# A second prompt, and a mask that is weaker in the middle of the picture and leaves out its left.
NOTHING_LEFT = {"destination": ["middle", 0], "source": ["none", 0], "x": 0, "y": 0, "operation": "multiply"}
MASKED: tuple[Edit, ...] = (
    add("middle", "SolidMask", value=0.7, width=64, height=96),
    add("none", "SolidMask", value=0.0, width=32, height=96),
    add("mask", "MaskComposite", **NOTHING_LEFT),
    prompt("region", LONG),
)

# A graph, how many calls of the model each of its requests carries under cfg=2, and the pieces of each batch group.
TOGETHER: dict[str, tuple[Graph, list[int], list[Any]]] = {
    "equal prompts": (of("", "equal", guided(3.0)), [1, 1], [[[0, 0, 1]], [[0, 1, 2]]]),  # one call of two rows
    "unequal prompts": (of("", "unequal", guided(3.0, negative=LONG)), [2, 2], [[[0, 0, 1]], [[1, 0, 1]]]),
}
# What keeps state between calls, or is not known: one call a request, in stock's order.
IN_ORDER: dict[str, Graph] = {
    "a step skipper of another pack": of(
        "", "skip", guided(3.0, negative=LONG), on_model("SkipEverySecondCall"), steps=4
    ),
    "default conditioning": of(
        "",
        "default",
        *MASKED,
        on_positive("ConditioningSetMask", mask=["mask", 0], strength=1.0, set_cond_area="default"),
        on("positive", "ConditioningSetDefaultCombine", cond=HERE, cond_DEFAULT=["region", 0]),
        guided(3.0),
    ),
}


@pytest.fixture(scope="module", autouse=True)
def pictures(comfy_server: ComfyServer, tiny_models: TinyModels) -> None:
    prepare(ComfyClient(comfy_server.url), tiny_models)


def reported(graph: Workflow) -> Workflow:
    """The same graph with our sampler, a request to the pool for each step's calls."""
    graph["sampler"]["class_type"] = "ParallelFluxSampler"
    graph["sampler"]["inputs"]["loop"] = "host"
    return graph


def both(client: ComfyClient, graph: Graph, plan: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """How far our latent is from stock ComfyUI's, and our report."""
    stock = saved_latent(client, client.queue(graph.workflow()))
    result = client.queue(reported(parallelized(graph.workflow(), **plan)))
    report = result.report()
    return relative_error(saved_latent(client, result), stock), report


def groups_of(report: dict[str, Any]) -> list[list[list[int]]]:
    """By batch group, the pieces [call, first row, row after the last] of the first request."""
    pieces = {rank["lane"]: rank["pieces"][0] for rank in report["ranks"] if "lane" in rank}
    return [pieces[batch_group] for batch_group in sorted(pieces)]


@pytest.mark.parametrize("name", TOGETHER)
def test_conditionings_go_together_on_two_batch_groups_and_equal_stock_comfyui(name: str, client: ComfyClient) -> None:
    graph, calls, groups = TOGETHER[name]
    error, report = both(client, graph, CFG_2)
    assert error <= ROUNDING
    assert report["plan"]["name"] == "cfg2-ring1-uly1"
    assert (report["timings"]["calls"], sorted(groups_of(report))) == (calls, groups)


@pytest.mark.parametrize("name", IN_ORDER)
def test_what_keeps_state_between_calls_sees_them_in_stocks_order(
    name: str, client: ComfyClient, comfy_server: ComfyServer
) -> None:
    told = comfy_server.log.count("one after the other")
    error, report = both(client, IN_ORDER[name], CFG_2)
    assert error <= ROUNDING
    assert set(report["timings"]["calls"]) == {1}
    assert comfy_server.log.count("one after the other") == told + 1
