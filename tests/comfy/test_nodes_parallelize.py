"""Parallelize Model behind stock loaders: the same file, everything applied to it, and what it refuses."""

from __future__ import annotations

import copy

from host import workflows
from host.client import ComfyClient, Workflow
from host.pack_workflows import TOLERANCE, latent_of, relative_error, to_latent
from host.server import ComfyServer
from host.tiny_models import TinyModels


def small(tiny: TinyModels, *, seed: int = 6) -> Workflow:
    return to_latent(workflows.text_to_image(tiny, steps=2, width=96, height=80, seed=seed))


def from_checkpoint(graph: Workflow, tiny: TinyModels) -> Workflow:
    graph["model"] = {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": tiny.checkpoint}}
    return graph


def parallelize(graph: Workflow, *, source: str = "model", devices: str = "cpu:2") -> Workflow:
    """The graph with Parallelize Model behind the node `source`; everybody else who used it uses that."""
    graph = copy.deepcopy(graph)
    for node in graph.values():
        for name, value in node["inputs"].items():
            if value == [source, 0]:
                node["inputs"][name] = ["parallel", 0]
    inputs = {"mode": "auto", "devices": devices, "ulysses": 1, "ring": 1}
    graph["config"] = {"class_type": "SPConfig", "inputs": inputs}
    graph["parallel"] = {"class_type": "ParallelizeModel", "inputs": {"model": [source, 0], "sp_config": ["config", 0]}}
    return graph


def with_sampling(graph: Workflow) -> Workflow:
    """ModelSamplingFlux between the model and whoever samples with it."""
    inputs = {"max_shift": 1.15, "base_shift": 0.5, "width": 96, "height": 80, "model": ["model", 0]}
    graph["shift"] = {"class_type": "ModelSamplingFlux", "inputs": inputs}
    graph["sampler"]["inputs"]["model"] = ["shift", 0]
    return graph


def with_dtype(graph: Workflow, dtype: str, *, behind: str = "model") -> Workflow:
    """ModelComputeDtype behind the node `behind`, for the sampler."""
    graph = copy.deepcopy(graph)
    graph["dtype"] = {"class_type": "ModelComputeDtype", "inputs": {"model": [behind, 0], "dtype": dtype}}
    graph["sampler"]["inputs"]["model"] = ["dtype", 0]
    return graph


def check(client: ComfyClient, stock: Workflow, ours: Workflow) -> None:
    assert relative_error(latent_of(client, ours), latent_of(client, stock)) <= TOLERANCE


def test_a_diffusion_model_and_a_checkpoint_equal_stock(client: ComfyClient, tiny_models: TinyModels) -> None:
    graph = small(tiny_models)
    check(client, graph, parallelize(graph))
    graph = from_checkpoint(small(tiny_models, seed=7), tiny_models)
    check(client, graph, parallelize(graph))


def test_what_was_applied_before_comes_along_and_what_comes_after_works(
    client: ComfyClient, tiny_models: TinyModels
) -> None:
    plain = small(tiny_models, seed=8)
    graph = workflows.with_lora(with_sampling(copy.deepcopy(plain)), tiny_models.lora_fused, strength=0.7)
    stock = latent_of(client, graph)
    assert relative_error(latent_of(client, plain), stock) > 1e-2
    for source in ("model", "shift", "lora"):
        assert relative_error(latent_of(client, parallelize(graph, source=source)), stock) <= TOLERANCE


def test_on_one_device_the_model_passes_through_with_a_note(
    client: ComfyClient, comfy_server: ComfyServer, tiny_models: TinyModels
) -> None:
    graph = small(tiny_models, seed=9)
    check(client, graph, parallelize(graph, devices="cpu:1"))
    assert "Parallelize Model: one device (cpu:0), nothing to share" in comfy_server.log


def test_the_workers_compute_in_what_this_graph_says_whatever_ran_before(
    client: ComfyClient, tiny_models: TinyModels
) -> None:
    """The stock model is one object for all graphs of a loader; the graph that sampled last leaves its dtype in it."""
    plain = small(tiny_models, seed=10)
    exact, half = latent_of(client, plain), latent_of(client, with_dtype(plain, "bf16"))
    rounding = relative_error(half, exact)
    assert rounding > 100 * TOLERANCE
    assert relative_error(latent_of(client, parallelize(plain)), exact) <= TOLERANCE
    ours = latent_of(client, parallelize(with_dtype(plain, "bf16"), source="dtype"))
    assert relative_error(ours, half) < rounding
    assert relative_error(ours, exact) > 100 * TOLERANCE, "it did not run in bf16"
    assert relative_error(latent_of(client, plain), exact) <= TOLERANCE
    assert relative_error(latent_of(client, parallelize(with_dtype(plain, "bf16"), source="dtype")), ours) <= TOLERANCE


def test_a_compute_dtype_that_the_workers_lack_is_refused(client: ComfyClient, tiny_models: TinyModels) -> None:
    graph = parallelize(small(tiny_models, seed=12))
    graph["reach"] = {
        "class_type": "ReachIntoModel",
        "inputs": {"model": ["model", 0], "way": "compute in float64"},
    }
    graph["parallel"]["inputs"]["model"] = ["reach", 0]
    result = client.queue(graph)
    first = result.error_line("ParallelizeModel")
    assert "computes in float64, the workers in float32, bfloat16, float16; put ModelComputeDtype" in first
