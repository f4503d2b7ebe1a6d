"""Sharded and offloaded weights sampled from ComfyUI: equal to stock, with a LoRA either way, in either loop.

Owns: that a layout of the weights changes no latent. Does not own: bytes per rank (tests/pool, tests/runtime).
"""

from __future__ import annotations

import pytest

from host.client import ComfyClient, Workflow
from host.pack_workflows import TOLERANCE, relative_error, saved_latent
from parity.edits import FILES, LONG, guided, lora
from parity.graphs import of
from parity.runner import VISIBLE, parallelized

LAYOUTS = {
    "sharded": {"devices": "cpu:2", "ulysses": 2, "weights": "sharded"},
    "sharded, a rank asleep": {"devices": "cpu:3", "cfg": 2, "weights": "sharded"},
    "offloaded": {"devices": "cpu:2", "ring": 2, "weights": "offloaded"},
}
GRAPH = of("", "LoRA, cfg 3, unequal prompts", lora(FILES.lora_fused, 0.7), guided(3.0, negative=LONG), batch=2)
WITHOUT_LORA = of("", "cfg 3, unequal prompts", guided(3.0, negative=LONG), batch=2)


def ours(plan: dict, *, mode: str, loop: str) -> Workflow:
    """The graph with our loader and our sampler."""
    graph = parallelized(GRAPH.workflow(), **plan, lora=mode)
    graph["sampler"]["class_type"] = "ParallelFluxSampler"
    graph["sampler"]["inputs"]["loop"] = loop
    return graph


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[] if name == "sharded" else [pytest.mark.full]) for name in LAYOUTS]
)
def test_a_layout_of_the_weights_changes_no_latent(layout: str, client: ComfyClient) -> None:
    stock = saved_latent(client, client.queue(GRAPH.workflow()))
    for mode, loop in (("merged", "auto"), ("side branch", "host")):
        result = client.queue(ours(LAYOUTS[layout], mode=mode, loop=loop)).require_success()
        (report,) = result.outputs["sampler"]["parallel_dit"]
        assert report["loop"]["kind"] == ("resident" if loop == "auto" else "host"), report["loop"]
        assert relative_error(saved_latent(client, result), stock) <= TOLERANCE, (mode, loop)


def test_a_lora_that_never_came_would_be_seen(client: ComfyClient) -> None:
    stock, without = (saved_latent(client, client.queue(graph.workflow())) for graph in (GRAPH, WITHOUT_LORA))
    assert relative_error(without, stock) > VISIBLE
