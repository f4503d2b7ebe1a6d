"""Files in fp16, bf16 and fp8, plain and scaled as ComfyUI writes them, against stock ComfyUI on the same file.

In half precision nothing agrees to the last digit. Both are held against one fp32 run of the same (rounded) weights,
and ours may be at most 10 % further away than stock is. Weights that stock computes in fp32 must agree to 1e-5.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from host import workflows
from host.client import ComfyClient, Workflow
from host.pack_workflows import TOLERANCE, latent_of, parallel, relative_error, to_latent
from host.tiny_models import TinyModels

FP8 = torch.float8_e4m3fn
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": FP8, "fp8 scaled": FP8, "fp8 scaled, old names": FP8}
HALF_ALLOWANCE = 1.1


def file_of(kind: str, part: str = "file") -> str:
    return f"tiny_{kind.replace(' ', '_').replace(',', '')}_{part}.safetensors"


def rounded(whole: dict[str, torch.Tensor], kind: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The tensors of a file of that kind, and their values in fp32."""
    stored, exact = {}, {}
    for name, tensor in whole.items():
        # ComfyUI's fp8 files keep everything but the matrices of the blocks in bf16
        in_fp8 = DTYPES[kind] is FP8 and "_blocks." in name and tensor.ndim == 2
        dtype = torch.bfloat16 if DTYPES[kind] is FP8 and not in_fp8 else DTYPES[kind]
        scale = tensor.abs().max() / 448 if in_fp8 and "scaled" in kind else None
        stored[name] = (tensor if scale is None else tensor / scale).to(dtype)
        exact[name] = stored[name].float() * (1 if scale is None else scale)
        if scale is not None and "old" in kind:
            stored[name.replace(".weight", ".scale_weight")] = scale
        elif scale is not None:
            stored[name.replace(".weight", ".weight_scale")] = scale
            text = b'{"format": "float8_e4m3fn"}'
            stored[name.replace(".weight", ".comfy_quant")] = torch.tensor(list(text), dtype=torch.uint8)
    if "old" in kind:
        stored["scaled_fp8"] = torch.zeros(0, dtype=FP8)
    return stored, exact


@pytest.fixture(scope="module", autouse=True)
def files(tiny_models: TinyModels) -> Iterator[None]:
    whole = load_file(tiny_models.diffusion_model(tiny_models.schnell))
    paths: list[Path] = []
    for kind in DTYPES:
        for part, tensors in zip(("file", "exact"), rounded(whole, kind), strict=True):
            paths.append(tiny_models.diffusion_model(file_of(kind, part)))
            save_file(tensors, paths[-1])
    yield
    for path in paths:
        path.unlink()


def graph_of(tiny: TinyModels, name: str) -> Workflow:
    graph = workflows.schnell(tiny, steps=1, width=112, height=80)
    graph["model"]["inputs"]["unet_name"] = name
    return to_latent(graph)


@pytest.mark.parametrize("kind", DTYPES)
def test_a_file_in_half_or_fp8_is_as_near_to_its_values_as_stock_is(
    kind: str, client: ComfyClient, tiny_models: TinyModels
) -> None:
    exact = latent_of(client, graph_of(tiny_models, file_of(kind, "exact")))
    stock = latent_of(client, graph_of(tiny_models, file_of(kind)))
    ours = latent_of(client, parallel(graph_of(tiny_models, file_of(kind))))
    allowed = max(TOLERANCE, HALF_ALLOWANCE * relative_error(stock, exact))
    assert relative_error(ours, exact) <= allowed
    assert allowed < 0.1, "stock itself is far from the file's values"


@pytest.mark.parametrize("kind", ["bf16", "fp8", "fp8 scaled"])
def test_the_same_file_computed_in_fp32_is_exact_with_and_without_a_lora(
    kind: str, client: ComfyClient, tiny_models: TinyModels
) -> None:
    for build in (lambda graph: graph, lambda graph: workflows.with_lora(graph, tiny_models.lora_fused, strength=0.5)):
        exact = latent_of(client, build(graph_of(tiny_models, file_of(kind, "exact"))))
        ours = latent_of(client, build(parallel(graph_of(tiny_models, file_of(kind)), weight_dtype="float32")))
        assert relative_error(ours, exact) <= TOLERANCE


def test_fp8_weights_stay_fp8_in_the_workers(client: ComfyClient, tiny_models: TinyModels) -> None:
    from parallel_runtime.checkpoint import ModelSpec
    from parallel_runtime.devices import parse_devices
    from parallel_runtime.pool.pool import Pool

    path = tiny_models.diffusion_model(file_of("fp8 scaled"))
    with Pool(parse_devices("cpu:1").devices) as pool:
        held = pool.load(ModelSpec.of(path, "bfloat16")).parameter_bytes[0]
    assert held <= path.stat().st_size
    assert held < 0.6 * 2 * sum(tensor.numel() for tensor in load_file(path).values())


def test_weights_with_a_scale_a_block_or_in_integers_are_refused(client: ComfyClient, tiny_models: TinyModels) -> None:
    whole = load_file(tiny_models.diffusion_model(tiny_models.schnell))
    name = "single_blocks.0.linear1"
    broken = {
        "blocks": (whole | {f"{name}.weight_scale": torch.ones(7, 2)}, "scale a block (mxfp8, nvfp4)"),
        "integers": (whole | {f"{name}.weight": whole[f"{name}.weight"].to(torch.int8)}, "is int8"),
    }
    for kind, (tensors, says) in broken.items():
        path = tiny_models.diffusion_model(f"tiny_{kind}.safetensors")
        save_file(tensors, path)
        result = client.queue(parallel(graph_of(tiny_models, path.name)))
        path.unlink()
        assert (result.status, result.error_node) == ("error", "ParallelFluxLoader")
        assert says in result.error_message.splitlines()[0]
