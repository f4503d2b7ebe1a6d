"""Files in halves and fp8 that ComfyUI's modules compute: equal to stock ComfyUI on the same file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from host.adapters import write_adapter
from host.client import ComfyClient, Workflow
from host.formats import DTYPES, rounded, same_picture
from host.pack_workflows import TOLERANCE, latent_of, relative_error
from parity.runner import switched_off

from .conftest import Stock
from .hosted import PLANS, VARIANTS, VISIBLE, WAN, between, ours, small, with_loras

LORA = "formats_wan.safetensors"


@pytest.fixture(scope="module")
def formats(family_models: Path) -> Iterator[None]:
    """Wan's file in each format and a LoRA, gone at the end."""
    written = [write_adapter(family_models / "loras" / LORA, "lora_alpha", {"blocks.1.ffn.0": (240, 120)})]
    written += [write_format(family_models / "diffusion_models", "Wan", kind) for kind in DTYPES]
    yield
    for path in written:
        path.unlink()


def write_format(folder: Path, family: str, kind: str) -> Path:
    with safe_open(folder / VARIANTS[family].file, framework="pt") as file:
        whole = {name: file.get_tensor(name) for name in file.keys()}
        metadata = file.metadata()
    save_file(rounded(whole, kind)[0], folder / file_of(family, kind), metadata=metadata)
    return folder / file_of(family, kind)


def file_of(family: str, kind: str) -> str:
    return f"{family}_{kind.replace(' ', '_').replace(',', '')}.safetensors"


def in_format(family: str, kind: str, **settings: int) -> Workflow:
    graph = small(family, **settings)
    graph["model"]["inputs"]["unet_name"] = file_of(family, kind)
    return graph


@pytest.mark.parametrize("kind", DTYPES)
def test_a_file_of_each_format_equals_stock(kind: str, hosted_client: ComfyClient, stock: Stock, formats: None) -> None:
    graph = in_format("Wan", kind)
    assert relative_error(stock(graph), stock(small())) > 10 * TOLERANCE, "the format changes nothing"
    assert relative_error(latent_of(hosted_client, ours(graph)), stock(graph)) <= TOLERANCE


@pytest.mark.parametrize("kind", ["bf16", "fp8", "fp8 scaled"])
def test_a_lora_on_a_file_of_a_narrow_format_equals_stock_and_is_taken_back(
    kind: str, hosted_client: ComfyClient, stock: Stock, formats: None
) -> None:
    """ComfyUI merges in the dtype that it holds the weight in: scaled fp8 is rounded to fp8 again."""
    plain = in_format("Wan", kind, seed=21)
    before = latent_of(hosted_client, ours(plain))
    graph = with_loras(plain, (LORA, 0.7))
    assert relative_error(stock(graph), stock(plain)) > VISIBLE
    assert relative_error(latent_of(hosted_client, ours(graph)), stock(graph)) <= TOLERANCE
    again = ours(plain)
    again["sampler"]["inputs"]["denoise"] = 0.9999999  # another cache key in ComfyUI, the same sigmas
    assert torch.equal(latent_of(hosted_client, again), before)


@pytest.mark.parametrize("kind", ["bf16", "fp8 scaled"])
def test_a_picture_in_half_precision_is_stocks(kind: str, hosted_client: ComfyClient, formats: None) -> None:
    graph = WAN.graph(cfg=1.0, steps=2)
    graph["model"]["inputs"]["unet_name"] = file_of("Wan", kind)
    right, allowed = same_picture(hosted_client, between(graph, "dtype", "ModelComputeDtype", dtype="bf16"))
    half = ours(graph, weight_dtype="bfloat16")
    assert relative_error(latent_of(hosted_client, half), right) <= allowed
    assert relative_error(latent_of(hosted_client, switched_off(half)), right) > 2 * allowed, "a wrong plan would pass"


@pytest.mark.full
@pytest.mark.usefixtures("qwen")
def test_qwen_image_in_scaled_fp8_equals_stock(hosted_client: ComfyClient, stock: Stock, family_models: Path) -> None:
    path = write_format(family_models / "diffusion_models", "Qwen-Image", "fp8 scaled")
    graph = in_format("Qwen-Image", "fp8 scaled", steps=1)
    for plan in PLANS:
        assert relative_error(latent_of(hosted_client, ours(graph, plan)), stock(graph)) <= TOLERANCE, plan
    path.unlink()
