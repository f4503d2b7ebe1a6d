"""A class without a plan beside stock ComfyUI: a U-Net equals it under what needs no plan, and sharing it is refused.

And a model that no sampler calls, which our loader refuses.

Does not own: which classes have no plan and why (tests/models/test_supported.py).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from host.client import ComfyClient, Workflow
from host.layouts import Row
from host.pack_workflows import TOLERANCE, parallel, relative_error
from host.server import ComfyServer
from host.tiny_models import write_layout
from parity.runner import Bench, FailedRunError

from .cases import CFG, FOUR, Case
from .comfy_classes import detected
from .files import write_model_files
from .graphs import node, through
from .unet import SD15, SD15_FILE
from .variant import Variant

CASE = Case(SD15, CFG)
PLANS = {
    "cfg 2": {**FOUR, "cfg": 2},
    "cfg 2, sharded": {**FOUR, "cfg": 2, "weights": "sharded"},
    "ulysses 2": {**FOUR, "ulysses": 2},
}

# RT-DETR by the one tensor that ComfyUI knows it by: it is refused before any other is looked for.
DETECTOR = replace(SD15, name="rt-detr", file="tiny_rt_detr.safetensors")
KNOWN_BY = [Row("encoder.pan_blocks.1.cv4.conv.weight", (8, 8, 1, 1), 0.1)]


def video_to_video(graph: Workflow) -> None:
    """SeedVR2's own prompts, which its node reads from the model."""
    through(graph, "latent", "EmptyHunyuanLatentVideo", "latent_image", width=64, height=64, length=5, batch_size=1)
    inputs = {"model": ["model", 0], "vae_conditioning": ["latent", 0]}
    through(graph, "prompts", "SeedVR2Conditioning", "positive", "negative", **inputs)


# SeedVR2 by one tensor of a block, and the two that its node reads; it has 3 billion weights more.
SEEDVR2 = Variant(name="seedvr2", family="SeedVR2", file="tiny_seedvr2.safetensors", add=video_to_video)
SEEDVR2_PROMPTS = [Row("blocks.31.mlp.all.proj_in_gate.weight", (8, 8), 0.1)]
SEEDVR2_PROMPTS += [Row("positive_conditioning", (58, 5120), 1.0), Row("negative_conditioning", (64, 5120), 1.0)]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def bench(hosted_server: ComfyServer, family_models: Path) -> Bench:
    """Stock's result is kept for the whole module."""
    write_model_files(family_models / "diffusion_models", [SD15_FILE])
    return Bench(ComfyClient(hosted_server.url), PLANS)


@pytest.mark.parametrize("plan", ["cfg 2", pytest.param("cfg 2, sharded", marks=pytest.mark.full)])
def test_a_u_net_equals_the_stock_loader_under_what_needs_no_plan(bench: Bench, plan: str) -> None:
    row = bench.compare(CASE, plan)
    assert row.problems == ()
    assert row.calls > 0
    other = bench.stock(Case(SD15))
    assert relative_error(other.latent, bench.stock(CASE).latent) > 1000 * TOLERANCE, "the negative prompt is not seen"


def test_a_u_net_whose_tokens_are_to_be_shared_is_refused_with_its_reason(bench: Bench) -> None:
    failure = bench.compare(CASE, "ulysses 2").failure
    assert "UNetModel has no plan to share its tokens: it is a U-Net, whose convolutions" in failure
    assert "use cfg parallel, data parallel or sharded weights, which need none" in failure


def test_a_model_that_no_sampler_calls_is_refused_under_any_plan(bench: Bench, family_models: Path) -> None:
    write_layout(family_models / "diffusion_models" / DETECTOR.file, KNOWN_BY, seed=1)
    with pytest.raises(FailedRunError) as refused:
        bench.ours(Case(DETECTOR, CFG), "cfg 2")
    assert "RTv4: it detects objects and no sampler calls it; use ComfyUI's Load Diffusion Model" in str(refused.value)


def test_what_a_node_reads_from_the_model_is_there(bench: Bench, family_models: Path) -> None:
    write_layout(family_models / "diffusion_models" / SEEDVR2.file, SEEDVR2_PROMPTS, seed=2)
    graph = parallel(SEEDVR2.graph(), **PLANS["cfg 2"], mode="manual")
    graph["wan"] = node("UNETLoader", unet_name="tiny_wan_t2v.safetensors", weight_dtype="default")
    graph["sampler"]["inputs"]["model"] = ["wan", 0]
    with pytest.raises(FailedRunError, match="58x5120"):  # which Wan's text layer, of another width, was given
        bench.run(graph)


@pytest.mark.full
def test_the_file_is_detected_as_its_class_with_exactly_its_tensors(bench: Bench, family_models: Path) -> None:
    path = str(family_models / "diffusion_models" / SD15_FILE.name)
    assert detected([path]) == {path: {"class": SD15_FILE.class_path, "missing": [], "unexpected": []}}
