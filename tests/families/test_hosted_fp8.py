"""Weights rounded to fp8 when they are loaded, by Load Diffusion Model's own names: the same picture as stock's.

On a CPU ComfyUI widens such weights where they are used, "fast" or not. A LoRA is merged and rounded to fp8 again, up
or down by numbers that ComfyUI draws by the weight's name.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from host.adapters import write_adapter
from host.client import ComfyClient, Workflow
from host.pack_workflows import TOLERANCE, latent_of, relative_error

from .conftest import Stock
from .hosted import VISIBLE, between, ours, parallelized, small, with_loras
from .variants import BY_NAME, write_families

DTYPES = ("fp8_e4m3fn", "fp8_e4m3fn_fast", "fp8_e5m2")
LORA = "fp8_lora.safetensors"
FLUX = BY_NAME["flux.1 kontext"]
PLANS = {"ulysses 2": {}, "sharded": {"weights": "sharded"}, "offloaded": {"weights": "offloaded"}}


@pytest.fixture(scope="module", autouse=True)
def lora(family_models: Path) -> None:
    """A LoRA for Wan."""
    modules = {"blocks.0.self_attn.q": (120, 120), "blocks.1.ffn.0": (240, 120), "blocks.2.cross_attn.v": (120, 120)}
    write_adapter(family_models / "loras" / LORA, "lora_alpha", modules)


def kept_in(graph: Workflow, dtype: str) -> Workflow:
    """The same stock graph with this weight_dtype."""
    graph = copy.deepcopy(graph)
    graph["model"]["inputs"]["weight_dtype"] = dtype
    return graph


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_in_fp8_with_a_lora_equal_stock(dtype: str, hosted_client: ComfyClient, stock: Stock) -> None:
    for graph in (small(), with_loras(small(), (LORA, 0.8))):
        right = stock(kept_in(graph, dtype))
        assert relative_error(stock(graph), right) > VISIBLE, "fp8 changes nothing"
        mine = ours(graph, weight_dtype=dtype)
        assert relative_error(latent_of(hosted_client, mine), right) <= TOLERANCE
        assert relative_error(latent_of(hosted_client, parallelized(kept_in(graph, dtype))), right) <= TOLERANCE
        alone = between(mine, "alone", "SwitchOffExchange")
        assert relative_error(latent_of(hosted_client, alone), right) > VISIBLE


@pytest.mark.parametrize("plan", PLANS)
def test_weights_in_fp8_lie_everywhere_as_stock_rounds_them(
    plan: str, hosted_client: ComfyClient, stock: Stock
) -> None:
    graph = with_loras(small(seed=31), (LORA, -0.6))
    right = stock(kept_in(graph, "fp8_e4m3fn"))
    mine = ours(graph, weight_dtype="fp8_e4m3fn", **PLANS[plan])
    assert relative_error(latent_of(hosted_client, mine), right) <= TOLERANCE
    plain = ours(small(seed=31), weight_dtype="fp8_e4m3fn", **PLANS[plan])
    assert relative_error(latent_of(hosted_client, plain), stock(kept_in(small(seed=31), "fp8_e4m3fn"))) <= TOLERANCE


def test_a_flux_in_fp8_is_computed_by_comfyuis_module(
    hosted_client: ComfyClient, stock: Stock, family_models: Path
) -> None:
    """Blocks of this pack keep the weights of the file."""
    write_families(family_models, only=[FLUX.name])
    graph = FLUX.graph(steps=2)
    right = stock(kept_in(graph, "fp8_e5m2"))
    assert relative_error(stock(graph), right) > VISIBLE
    assert relative_error(latent_of(hosted_client, ours(graph, weight_dtype="fp8_e5m2")), right) <= TOLERANCE
    assert relative_error(latent_of(hosted_client, parallelized(kept_in(graph, "fp8_e5m2"))), right) <= TOLERANCE


def test_fp8_takes_a_quarter_of_the_memory_of_a_file_in_fp32(hosted_client: ComfyClient) -> None:
    def held(graph: Workflow) -> int:
        latent_of(hosted_client, graph)
        (pool,) = (each for each in hosted_client.get("/parallel_dit/state")["pools"] if each["memory"])
        return pool["memory"][0]["parameter_bytes"]

    assert held(ours(small(seed=41), weight_dtype="fp8_e4m3fn")) > 0


def test_a_quantised_file_is_not_rounded_again(hosted_client: ComfyClient, family_models: Path) -> None:
    """ComfyUI keeps its layers as they are, so the words would mean nothing."""
    assert torch
