"""Weights rounded to fp8 when they are loaded, by Load Diffusion Model's own names: the same picture as stock's.

On a CPU ComfyUI widens such weights where they are used, "fast" or not. A LoRA is merged and rounded to fp8 again, up
or down by numbers that ComfyUI draws by the weight's name.
"""

import copy
from pathlib import Path

import pytest
from rounding import ROUNDING

from host.adapters import write_adapter
from host.client import ComfyClient, Workflow
from host.fetch import comfyui_path
from host.pack_workflows import latent_of, relative_error, saved_latent, to_latent
from parallel_runtime.checkpoint import ComfyUI, ModelSpec
from parallel_runtime.devices import parse_devices
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.pool import Pool

from .conftest import Stock
from .graphs import node
from .hosted import VISIBLE, WAN, between, ours, parallelized, small, with_loras
from .quantised import file_of, graph_of, write_files

DTYPES = ("fp8_e4m3fn", "fp8_e4m3fn_fast", "fp8_e5m2")
LORA = "fp8_lora.safetensors"
WEIGHTS = dict(zip(DTYPES, ("replicated", "sharded", "offloaded"), strict=True))


@pytest.fixture(scope="module", autouse=True)
def lora(family_models: Path) -> None:
    modules = {"blocks.0.self_attn.q": (120, 120), "blocks.1.ffn.0": (240, 120), "blocks.2.cross_attn.v": (120, 120)}
    write_adapter(family_models / "loras" / LORA, "lora_alpha", modules)


def kept_in(graph: Workflow, dtype: str) -> Workflow:
    """The same stock graph with this weight_dtype."""
    graph = copy.deepcopy(graph)
    graph["model"]["inputs"]["weight_dtype"] = dtype
    return graph


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_in_fp8_with_a_lora_equal_stock(dtype: str, hosted_client: ComfyClient, stock: Stock) -> None:
    graph = with_loras(small(), (LORA, 0.8))
    right = stock(kept_in(graph, dtype))
    assert relative_error(stock(graph), right) > VISIBLE, "fp8 changes nothing"
    mine = to_latent(ours(graph, weight_dtype=dtype, weights=WEIGHTS[dtype], sampler="ParallelSampler"))
    result = hosted_client.queue(mine).require_success()
    assert result.report()["loop"]["kind"] == "resident"
    assert relative_error(saved_latent(hosted_client, result), right) <= ROUNDING
    alone = between(mine, "alone", "SwitchOffExchange")
    assert relative_error(latent_of(hosted_client, alone), right) > VISIBLE
    if dtype == "fp8_e5m2":
        assert relative_error(latent_of(hosted_client, parallelized(kept_in(graph, dtype))), right) <= ROUNDING


def test_fp8_takes_a_byte_a_weight_as_counted_and_as_held(hosted_client: ComfyClient, family_models: Path) -> None:
    path = family_models / "diffusion_models" / WAN.file

    def counted(dtype: str) -> int:
        """Bytes that ComfyUI is told of, of both ranks."""
        graph = ours(small(), weight_dtype=dtype)
        graph = {name: graph[name] for name in ("model", "config")}
        graph["bytes"] = node("ReportModelBytes", model=["model", 0])
        (found,) = hosted_client.queue(graph).require_success().outputs["bytes"]["model_bytes"]
        return int(found)

    with Pool(parse_devices("cpu:2").devices, threads_per_rank=1) as pool:
        for dtype in ("default", *DTYPES):
            kept = {} if dtype == "default" else {"kept": dtype}
            host = ComfyUI(str(comfyui_path()))
            spec = ModelSpec.of(path, "float32", comfyui=host, **kept)
            held = pool.load(spec, ParallelPlan(ulysses=1, ring=2)).parameter_bytes
            assert sum(held) == counted(dtype), dtype
            assert not kept or sum(held) < 0.3 * counted("default"), "the file is in fp32"


def test_a_quantised_file_is_not_rounded_again(hosted_client: ComfyClient, family_models: Path) -> None:
    """ComfyUI leaves its layers as they are, so the words would mean nothing."""
    paths = write_files(family_models, ["fp8 e4m3"])
    graph = ours(graph_of(file_of("fp8 e4m3")), weight_dtype="fp8_e5m2")
    result = hosted_client.queue(graph)
    for path in paths:
        path.unlink()
    first_line = result.error_line("ParallelFluxLoader")
    assert "weight_dtype=fp8_e5m2: the layers of " in first_line
    assert "set weight_dtype to default" in first_line
