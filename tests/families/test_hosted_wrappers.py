"""Stock nodes around a model that ComfyUI's modules compute: caches, cfg, ControlNets, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from host.client import ComfyClient, Workflow
from host.pack_workflows import TOLERANCE, latent_of, relative_error
from host.tiny_models import write_layout

from .comfy_classes import shapes_of
from .conftest import Stock
from .files import ModelFile
from .graphs import encoder, node, picture
from .hosted import PLANS, VISIBLE, between, ours, small

LAYERED = "tiny_qwen_controlnet.safetensors"
FUN = "tiny_qwen_fun_controlnet.safetensors"
CONTROLNETS = "comfy.ldm.qwen_image.controlnet"


@pytest.mark.parametrize(
    ("cache", "plan"),
    [
        pytest.param(cache, plan, marks=[] if plan == first else [pytest.mark.full])
        for cache, first in (("EasyCache", "ulysses 2"), ("LazyCache", "cfg 2"))
        for plan in PLANS
    ],
)
def test_a_cache_skips_the_steps_that_it_skips_in_stock(
    cache: str, plan: str, hosted_client: ComfyClient, stock: Stock
) -> None:
    plain = small(seed=40, steps=6)
    settings = {"reuse_threshold": 0.5, "start_percent": 0.1, "end_percent": 0.95, "verbose": False}
    graph = between(plain, "cache", cache, **settings)
    right = stock(graph)
    assert relative_error(stock(plain), right) > VISIBLE, "no step is skipped"
    assert relative_error(latent_of(hosted_client, ours(graph, plan)), right) <= TOLERANCE


@pytest.mark.parametrize("plan", PLANS)
def test_nodes_that_change_cfg_equal_stock(plan: str, hosted_client: ComfyClient, stock: Stock) -> None:
    plain = small(seed=41)
    graph = between(between(plain, "tcfg", "TCFG"), "zero star", "CFGZeroStar")
    graph = between(graph, "norm", "CFGNorm", strength=0.8)
    graph = between(graph, "rescaled", "RescaleCFG", multiplier=0.5)
    right = stock(graph)
    assert relative_error(stock(plain), right) > VISIBLE
    assert relative_error(latent_of(hosted_client, ours(graph, plan)), right) <= TOLERANCE


@pytest.mark.parametrize("plan", PLANS)
def test_context_windows_equal_stock(plan: str, hosted_client: ComfyClient, stock: Stock) -> None:
    plain = small(seed=45)
    sizes = {"context_length": 9, "context_overlap": 4, "context_stride": 1, "closed_loop": False}
    sizes |= {"freenoise": False, "retain_first_frame": False, "split_conds_to_windows": False}
    settings = {"context_schedule": "standard_static", "fuse_method": "pyramid"}
    graph = between(plain, "windows", "WanContextWindowsManual", **sizes, **settings)
    right = stock(graph)
    assert relative_error(stock(plain), right) > VISIBLE
    assert relative_error(latent_of(hosted_client, ours(graph, plan)), right) <= TOLERANCE


def write_controlnet(folder: Path, name: str, class_name: str, arguments: dict[str, int], dtype: torch.dtype) -> Path:
    """Writes the file of a ControlNet of Qwen-Image."""
    file = ModelFile(name=name, class_path=f"{CONTROLNETS}.{class_name}", arguments=arguments, seed=33)
    shapes = shapes_of({name: (file.class_path, arguments)})[name]
    return write_layout(folder / "controlnet" / name, file.rows(shapes), seed=33, dtype=dtype)


@pytest.fixture
def layered(family_models: Path) -> Iterator[str]:
    """A ControlNet of one layer whose output goes to blocks as a list (0.7 GB); gone at the end."""
    path = write_controlnet(family_models, LAYERED, "QwenImageControlNetModel", {"num_layers": 1}, torch.bfloat16)
    yield path.name
    path.unlink()


def with_controlnet(graph: Workflow, name: str) -> Workflow:
    """Apply ControlNet with a random picture on both prompts."""
    graph["controlnet"] = node("ControlNetLoader", control_net_name=name)
    inputs = {"control_net": ["controlnet", 0], "image": picture(graph, "hint"), "vae": encoder(graph, temporal=1)}
    settings = {"strength": 0.9, "start_percent": 0.0, "end_percent": 1.0}
    sampler = graph["sampler"]["inputs"]
    sides = {side: sampler[side] for side in ("positive", "negative")}
    graph["control"] = node("ControlNetApplyAdvanced", **sides, **inputs, **settings)
    sampler["positive"], sampler["negative"] = ["control", 0], ["control", 1]
    return graph


@pytest.mark.full
@pytest.mark.usefixtures("qwen")
def test_a_controlnet_of_qwen_image_equals_stock(hosted_client: ComfyClient, stock: Stock, layered: str) -> None:
    plain = small("Qwen-Image", seed=42, steps=1)
    graph = with_controlnet(small("Qwen-Image", seed=42, steps=1), layered)
    right = stock(graph)
    assert relative_error(stock(plain), right) > VISIBLE
    for plan in PLANS:
        assert relative_error(latent_of(hosted_client, ours(graph, plan)), right) <= TOLERANCE, plan


def test_a_controlnet_that_computes_with_the_models_layers_is_refused(
    hosted_client: ComfyClient, family_models: Path
) -> None:
    sizes = {"inner_dim": 16, "num_attention_heads": 1, "attention_head_dim": 16}
    write_controlnet(family_models, FUN, "QwenImageFunControlNetModel", sizes, torch.float32)
    result = hosted_client.queue(ours(with_controlnet(small(seed=43), FUN)))
    assert (result.status, result.error_node) == ("error", "KSampler")
    first_line = result.error_message.splitlines()[0]
    assert "QwenFunControlNet" in first_line and "Apply ControlNet (node control)" in first_line


def test_block_patches_are_refused_by_the_node_that_adds_them(hosted_client: ComfyClient) -> None:
    result = hosted_client.queue(ours(between(small(seed=44), "reach", "ReachIntoModel", way="patch block")))
    assert (result.status, result.error_node) == ("error", "ReachIntoModel")
    first_line = result.error_message.splitlines()[0]
    assert "(node reach): it patches the model's blocks (double_block)" in first_line
    assert "remove that node, or use Load Diffusion Model" in first_line
