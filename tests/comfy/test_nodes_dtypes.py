"""What is computed in a half, and a file of several dtypes, against stock ComfyUI on the same file.

In half precision nothing agrees to the last digit: ours may differ from stock's picture by half as much again as
stock's own exact attention kernels do. fp16 under every plan is runtime/test_parity.py's, files in fp8 are
families/test_hosted_fp8.py's and models/test_quantised.py's.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from safetensors.torch import load_file, save_file

from host import workflows
from host.client import ComfyClient, Workflow
from host.formats import same_picture
from host.pack_workflows import TOLERANCE, latent_of, parallel, relative_error, saved_latent, to_latent
from host.tiny_models import TinyModels
from host.workflows import between
from parity.runner import PLANS, switched_off

MIXED = "tiny_dev_mixed.safetensors"
LOOPS = {"host": "host", "auto": "resident"}


def mixed(whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A file whose tensors take turns in three dtypes."""
    turns = (torch.float32, torch.bfloat16, torch.float16)
    return {name: tensor.to(turns[number % 3]) for number, (name, tensor) in enumerate(sorted(whole.items()))}


@pytest.fixture(scope="module", autouse=True)
def files(tiny_models: TinyModels) -> Iterator[None]:
    path = tiny_models.diffusion_model(MIXED)
    save_file(mixed(load_file(tiny_models.diffusion_model(tiny_models.dev))), path)
    yield
    path.unlink()


def ours_of(graph: Workflow, plan: str, loop: str) -> Workflow:
    graph = copy.deepcopy(graph)
    graph["sampler"]["inputs"]["model"] = graph.pop("dtype")["inputs"]["model"]
    settings = {"mode": "manual", **PLANS[plan]}
    graph = parallel(graph, weight_dtype="bfloat16", sampler="ParallelFluxSampler", **settings)
    graph["sampler"]["inputs"] |= {"loop": loop, "modulations": "keep"}
    return graph


def test_a_picture_in_half_precision_is_stocks_in_either_loop(client: ComfyClient, tiny_models: TinyModels) -> None:
    """Its sigmas are no numbers that a half holds."""
    graph = to_latent(workflows.text_to_image(tiny_models, steps=6, width=112, height=80))
    graph["sampler"]["inputs"]["scheduler"] = "beta"
    graph = between(graph, "dtype", "ModelComputeDtype", dtype="bf16")
    stock, allowed = same_picture(client, graph)
    assert allowed < 2e-2, "stock moves so far that a wrong plan would pass"
    for plan, loop in (("ulysses 2", "host"), ("ring 3", "auto")):
        result = client.queue(ours_of(graph, plan, loop)).require_success()
        assert result.report()["loop"]["kind"] == LOOPS[loop]
        assert relative_error(saved_latent(client, result), stock) <= allowed, f"{plan}, {loop} loop"
    wrong = switched_off(ours_of(graph, "ring 3", "host"))
    assert relative_error(latent_of(client, wrong), stock) > 2 * allowed


def test_a_file_of_mixed_dtypes_is_computed_in_each_dtype_as_stock_does(
    client: ComfyClient, tiny_models: TinyModels
) -> None:
    graph = to_latent(workflows.text_to_image(tiny_models, width=112, height=80))
    graph["model"]["inputs"]["unet_name"] = MIXED
    stock = latent_of(client, graph)
    assert relative_error(latent_of(client, parallel(graph)), stock) <= TOLERANCE
    half, allowed = same_picture(client, between(graph, "dtype", "ModelComputeDtype", dtype="bf16"))
    assert relative_error(half, stock) > 100 * TOLERANCE
    assert relative_error(latent_of(client, parallel(graph, weight_dtype="bfloat16")), half) <= allowed
