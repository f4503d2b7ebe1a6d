"""Models that no sampler calls, which our loader refuses; and what a node reads from a model that has no plan."""

from dataclasses import replace
from pathlib import Path

import pytest

from host.client import ComfyClient
from host.layouts import Row
from host.pack_workflows import parallel
from host.server import ComfyServer
from host.tiny_models import write_layout
from parity.runner import Bench, FailedRunError

from .cases import CFG, FOUR, Case
from .graphs import node
from .seedvr import ROWS as SEEDVR2_ROWS
from .seedvr import SEEDVR2
from .variants import BY_NAME

PLANS = {"cfg 2": {**FOUR, "cfg": 2}}

# RT-DETR by the one tensor that ComfyUI knows it by: it is refused before any other is looked for.
DETECTOR = replace(BY_NAME["sd1.5"], name="rt-detr", file="tiny_rt_detr.safetensors")
KNOWN_BY = [Row("encoder.pan_blocks.1.cv4.conv.weight", (8, 8, 1, 1), 0.1)]


@pytest.fixture(scope="module")
def bench(hosted_server: ComfyServer) -> Bench:
    return Bench(ComfyClient(hosted_server.url), PLANS)


def test_a_model_that_no_sampler_calls_is_refused_under_any_plan(bench: Bench, family_models: Path) -> None:
    write_layout(family_models / "diffusion_models" / DETECTOR.file, KNOWN_BY, seed=1)
    with pytest.raises(FailedRunError) as refused:
        bench.ours(Case(DETECTOR, CFG), "cfg 2")
    assert "RTv4: it detects objects and no sampler calls it; use ComfyUI's Load Diffusion Model" in str(refused.value)


def test_what_a_node_reads_from_the_model_is_there(bench: Bench, family_models: Path) -> None:
    write_layout(family_models / "diffusion_models" / SEEDVR2.file, SEEDVR2_ROWS, seed=2)
    graph = parallel(SEEDVR2.graph(), **PLANS["cfg 2"], mode="manual")
    graph["wan"] = node("UNETLoader", unet_name="tiny_wan_t2v.safetensors", weight_dtype="default")
    graph["sampler"]["inputs"]["model"] = ["wan", 0]
    failed = bench.client.queue(graph)
    assert "58x5120" in failed.error_message  # which Wan's text layer, of another width, was given


def test_auto_leaves_a_class_that_takes_whole_batches_to_one_device_and_says_so(
    bench: Bench, family_models: Path
) -> None:
    """With cfg parallel or data parallel every rank but one would hold all weights and never compute."""
    write_layout(family_models / "diffusion_models" / SEEDVR2.file, SEEDVR2_ROWS, seed=2)
    for weights, plan, says in (
        ("replicated", "single", "one device computes it (weights set to sharded"),
        ("sharded", "cfg2", "the devices share its weights alone"),
    ):
        graph = parallel(SEEDVR2.graph(), **FOUR, mode="auto", weights=weights)
        graph["wan"] = node("UNETLoader", unet_name="tiny_wan_t2v.safetensors", weight_dtype="default")
        graph["sampler"]["inputs"]["model"] = ["wan", 0]  # which has no use for these prompts: the loader is what runs
        texts = bench.client.queue(graph).texts
        told = "\n".join(text for name, text in texts if name == "model")
        assert plan in told.splitlines()[0] and "ranks cannot share an image of NaDiT" in told and says in told, told
