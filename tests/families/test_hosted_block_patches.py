"""ControlNets that stock nodes put between the blocks, rebuilt in the ranks: equal to stock, and refused elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from host.client import ComfyClient, Workflow
from host.pack_workflows import TOLERANCE, latent_of, parallel, relative_error

from .conftest import Stock
from .files import write_model_files
from .graphs import encoder, node, picture
from .hosted import VISIBLE, between, parallelized, small
from .variant import Variant
from .variants import BY_NAME, FILES

PLANS = {
    "ulysses 2": {"ulysses": 2},
    "ring 2": {"ring": 2},
    "sharded": {"ulysses": 2, "weights": "sharded"},
    "cfg 2": {"cfg": 2},
}

NODES = {"qwen-image": ("QwenImageDiffsynthControlnet", 4), "z-image": ("ZImageFunControlnet", 0)}


@pytest.fixture(scope="module")
def z_image(family_models: Path) -> Iterator[Variant]:
    """Z-Image (1.8 GB); its file is gone at the end."""
    variant = BY_NAME["z-image"]
    (path,) = write_model_files(family_models / "diffusion_models", [FILES[variant.file]])
    yield variant
    path.unlink()


def controlled(
    graph: Workflow,
    *,
    family: str = "qwen-image",
    width: int = 112,
    height: int = 80,
    strength: float = 0.9,
) -> Workflow:
    """The graph with stock's ControlNet between its model and its sampler, of a picture of this size."""
    graph, (class_type, temporal) = copy.deepcopy(graph), NODES[family]
    graph["patch"] = node("RandomModelPatch", family=family)
    inputs = {"model_patch": ["patch", 0], "image": picture(graph, "hint", width=width, height=height)}
    inputs |= {"vae": encoder(graph, temporal=temporal), "strength": strength}
    return between(graph, "diffsynth", class_type, **inputs)


def under(graph: Workflow, plan: str) -> Workflow:
    """The same graph with our loader."""
    return parallel(graph, mode="manual", **PLANS[plan])


@pytest.mark.full
@pytest.mark.usefixtures("qwen")
@pytest.mark.parametrize("plan", ["ulysses 2", "ring 2", "sharded", "cfg 2"])
def test_a_controlnet_between_the_blocks_equals_stock(plan: str, hosted_client: ComfyClient, stock: Stock) -> None:
    plain = small("Qwen-Image", seed=46, steps=1)
    graph = controlled(plain)
    right = stock(graph)
    assert relative_error(stock(plain), right) > VISIBLE, "the ControlNet changes nothing"
    assert relative_error(latent_of(hosted_client, under(graph, plan)), right) <= TOLERANCE


@pytest.mark.full
@pytest.mark.usefixtures("qwen")
def test_a_picture_of_another_size_strengths_and_two_of_them_equal_stock_and_are_taken_back(
    hosted_client: ComfyClient, stock: Stock
) -> None:
    plain = small("Qwen-Image", seed=47, steps=1)
    before = latent_of(hosted_client, under(plain, "ulysses 2"))
    one = controlled(plain, width=96, height=64, strength=0.4)
    two = copy.deepcopy(one)
    inputs = {**two["diffsynth"]["inputs"], "model": ["diffsynth", 0], "strength": -0.3}
    two["again"] = node("QwenImageDiffsynthControlnet", **inputs)
    two["sampler"]["inputs"]["model"] = ["again", 0]
    assert relative_error(stock(one), stock(two)) > VISIBLE
    for graph in (one, two):
        assert relative_error(latent_of(hosted_client, under(graph, "ulysses 2")), stock(graph)) <= TOLERANCE
    again = under(plain, "ulysses 2")
    again["sampler"]["inputs"]["denoise"] = 0.9999999  # another cache key in ComfyUI, the same sigmas
    assert torch.equal(latent_of(hosted_client, again), before)


@pytest.mark.full
@pytest.mark.usefixtures("qwen")
def test_a_model_that_has_the_controlnet_before_parallelize_model_equals_stock(
    hosted_client: ComfyClient, stock: Stock
) -> None:
    graph = controlled(small("Qwen-Image", seed=46, steps=1))
    ours = parallelized(graph, source="diffsynth")
    assert relative_error(latent_of(hosted_client, ours), stock(graph)) <= TOLERANCE


@pytest.mark.full
@pytest.mark.parametrize("plan", ["ulysses 2", "ring 2", "sharded"])
def test_a_controlnet_of_z_image_equals_stock(
    plan: str, hosted_client: ComfyClient, stock: Stock, z_image: Variant
) -> None:
    plain = z_image.graph(cfg=1.0, steps=1)
    graph = controlled(plain, family="z-image")
    right = stock(graph)
    assert relative_error(stock(plain), right) > VISIBLE
    assert relative_error(latent_of(hosted_client, under(graph, plan)), right) <= TOLERANCE


def test_a_controlnet_for_another_model_is_refused_before_a_step(hosted_client: ComfyClient) -> None:
    result = hosted_client.queue(under(controlled(small(seed=48)), "ulysses 2"))
    assert (result.status, result.error_node) == ("error", "KSampler")
    first_line = result.error_message.splitlines()[0]
    assert "DiffSynthCnetPatch is made for QwenImageTransformer2DModel, and this MODEL is a WanModel" in first_line
    assert "remove the node that adds it" in first_line
