"""Parallelize Model on models that ComfyUI's modules compute: the same file, and all that was applied to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import save_file

from host.adapters import write_adapter
from host.client import ComfyClient
from host.pack_workflows import TOLERANCE, latent_of, relative_error

from .conftest import Stock
from .graphs import node
from .hosted import PLANS, VISIBLE, WAN, between, parallelized, small, with_loras

LORA, CHECKPOINT = "parallelize_wan.safetensors", "tiny_wan_all_in_one.safetensors"


@pytest.fixture(scope="module", autouse=True)
def files(family_models: Path) -> Iterator[None]:
    """A LoRA for Wan, and Wan's transformer as a checkpoint has it."""
    lora = write_adapter(family_models / "loras" / LORA, "lora_alpha", {"blocks.1.ffn.0": (240, 120)})
    checkpoint = family_models / "checkpoints" / CHECKPOINT
    checkpoint.parent.mkdir(exist_ok=True)
    with safe_open(family_models / "diffusion_models" / WAN.file, framework="pt") as file:
        whole = {f"model.diffusion_model.{name}": file.get_tensor(name) for name in file.keys()}
        save_file(whole, checkpoint, metadata=file.metadata())
    yield
    lora.unlink()
    checkpoint.unlink()


@pytest.mark.parametrize("plan", PLANS)
def test_lora_and_model_sampling_before_and_behind_it_equal_stock(
    plan: str, hosted_client: ComfyClient, stock: Stock
) -> None:
    graph = with_loras(between(small(seed=30), "shift", "ModelSamplingSD3", shift=5.0), (LORA, 0.7))
    right = stock(graph)
    assert relative_error(stock(small(seed=30)), right) > VISIBLE
    for source in ("model", "shift", "lora 0"):
        latent = latent_of(hosted_client, parallelized(graph, plan, source=source))
        assert relative_error(latent, right) <= TOLERANCE, source


def test_a_checkpoint_equals_stock(hosted_client: ComfyClient, stock: Stock) -> None:
    graph = with_loras(small(seed=31), (LORA, 0.7))
    graph["model"] = node("CheckpointLoaderSimple", ckpt_name=CHECKPOINT)
    for source in ("model", "lora 0"):
        latent = latent_of(hosted_client, parallelized(graph, source=source))
        assert relative_error(latent, stock(graph)) <= TOLERANCE, source


@pytest.mark.full
@pytest.mark.usefixtures("qwen")
def test_qwen_image_equals_stock(hosted_client: ComfyClient, stock: Stock) -> None:
    graph = between(small("Qwen-Image", seed=32, steps=1), "shift", "ModelSamplingAuraFlow", shift=3.1)
    latent = latent_of(hosted_client, parallelized(graph, source="shift"))
    assert relative_error(latent, stock(graph)) <= TOLERANCE
