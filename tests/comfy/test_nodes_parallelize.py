"""Parallelize Model behind stock loaders: the same file, everything applied to it, and what it refuses."""

import shutil

import pytest
from rounding import ROUNDING

from host import workflows
from host.client import ComfyClient, Workflow
from host.pack_workflows import latent_of, parallelized, relative_error, to_latent
from host.server import ComfyServer
from host.tiny_models import TinyModels
from host.workflows import between


def small(tiny: TinyModels, *, seed: int) -> Workflow:
    return to_latent(workflows.text_to_image(tiny, steps=2, width=96, height=80, seed=seed))


def test_a_checkpoint_equals_stock(client: ComfyClient, tiny_models: TinyModels) -> None:
    graph = small(tiny_models, seed=7)
    graph["model"] = {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": tiny_models.checkpoint}}
    assert relative_error(latent_of(client, parallelized(graph)), latent_of(client, graph)) <= ROUNDING


def test_what_was_applied_before_comes_along_and_what_comes_after_works(
    client: ComfyClient, tiny_models: TinyModels
) -> None:
    plain = small(tiny_models, seed=8)
    shifted = between(plain, "shift", "ModelSamplingFlux", max_shift=1.15, base_shift=0.5, width=96, height=80)
    graph = workflows.with_lora(shifted, tiny_models.lora_fused, strength=0.7)
    stock = latent_of(client, graph)
    assert relative_error(latent_of(client, plain), stock) > 1e-2
    for source in ("model", "shift", "lora"):
        assert relative_error(latent_of(client, parallelized(graph, source=source)), stock) <= ROUNDING


def test_the_workers_compute_in_what_this_graph_says_whatever_ran_before(
    client: ComfyClient, tiny_models: TinyModels
) -> None:
    """The stock model is one object for all graphs of a loader; the graph that sampled last leaves its dtype in it."""
    plain = small(tiny_models, seed=10)
    in_half = between(plain, "dtype", "ModelComputeDtype", dtype="bf16")
    exact, half = latent_of(client, plain), latent_of(client, in_half)
    rounding = relative_error(half, exact)
    assert rounding > 100 * ROUNDING
    assert relative_error(latent_of(client, parallelized(plain)), exact) <= ROUNDING
    ours = latent_of(client, parallelized(in_half, source="dtype"))
    assert relative_error(ours, half) < rounding
    assert relative_error(ours, exact) > 100 * ROUNDING, "it did not run in bf16"
    assert relative_error(latent_of(client, plain), exact) <= ROUNDING
    assert relative_error(latent_of(client, parallelized(in_half, source="dtype")), ours) <= ROUNDING


@pytest.mark.parametrize("way", ["set_parameters", "register sigmas", "latent format"])
def test_what_a_node_set_on_the_stock_model_itself_takes_effect(
    way: str, client: ComfyClient, tiny_models: TinyModels
) -> None:
    """ComfyUI has one model for all MODELs of a loader, so this test has a file of its own."""
    graph = small(tiny_models, seed=11)
    graph["model"]["inputs"]["unet_name"] = name = f"tiny_flux_{way.replace(' ', '_')}.safetensors"
    shutil.copyfile(tiny_models.diffusion_model(tiny_models.dev), tiny_models.diffusion_model(name))
    plain = latent_of(client, graph)
    changed = between(graph, "set", "SetOnModel", way=way)
    ours = latent_of(client, parallelized(changed, source="set"))
    stock = latent_of(client, changed)
    assert relative_error(plain, stock) > 1e-2
    assert relative_error(ours, stock) <= ROUNDING


def test_a_patch_that_keeps_the_stock_model_keeps_the_parallel_one(tiny_models: TinyModels) -> None:
    """It reads what the MODEL patches there; the stock one is not patched while ours runs.

    ComfyUI puts a method back as an attribute of its model, which outlives its MODEL then: so a server of its own."""
    plain = small(tiny_models, seed=12)
    with ComfyServer(models=tiny_models.models) as server:
        client = ComfyClient(server.url)
        graphs = [between(plain, "set", "SetOnModel", way=way) for way in ("patch method", "patch around method")]
        ours = [latent_of(client, parallelized(graph, source="set")) for graph in graphs]
        without = latent_of(client, parallelized(plain))
        assert not server.leaks, "ours goes with its MODEL"
        for mine, graph in zip(ours, graphs, strict=True):
            stock = latent_of(client, graph)
            assert relative_error(without, stock) > 1e-2
            assert relative_error(mine, stock) <= ROUNDING
