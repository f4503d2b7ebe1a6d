"""Two runs that share a MODEL's weights and take turns: each has its own plan and weight patches, in every step.

Owns: what is a run's own. That several runs make the images of single ones is test_nodes_list_sampler.py's.
"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from host import workflows
from host.client import ComfyClient, Workflow
from host.pack_workflows import TOLERANCE, latent_of, parallel, relative_error, saved_latent, to_latent
from host.server import ComfyServer
from host.tiny_models import TinyModels
from host.workers import worker_pids

STEPS = 4


@pytest.fixture(scope="module")
def lora(tiny_models: TinyModels) -> str:
    """A LoRA that moves the latent far, in the server's folder."""
    hidden, name = tiny_models.shape.hidden, "taking_turns.safetensors"
    module, generator = "diffusion_model.double_blocks.0.img_attn.qkv", torch.Generator().manual_seed(1)
    up, down = torch.randn(3 * hidden, 4, generator=generator), torch.randn(4, hidden, generator=generator)
    tensors = {f"{module}.lora_up.weight": up * 0.3, f"{module}.lora_down.weight": down * hidden**-0.5}
    save_file(tensors, tiny_models.models / "loras" / name)
    return name


def graph_of(tiny: TinyModels, *, seed: int) -> Workflow:
    return workflows.text_to_image(tiny, seed=seed, steps=STEPS, width=128, height=96)


def with_lora(graph: Workflow, lora: str) -> Workflow:
    """The graph with the LoRA between its model and its sampler."""
    inputs = {"model": ["model", 0], "lora_name": lora, "strength_model": 1.0}
    graph["lora"] = {"class_type": "LoraLoaderModelOnly", "inputs": inputs}
    graph["sampler"]["inputs"]["model"] = ["lora", 0]
    return graph


def in_turn(graph: Workflow, lora: str | None, *, seed: int, cancel_after: int = 0) -> Workflow:
    """One run over Ulysses, the other over Ring with the LoRA, or as the first without one."""
    graph = to_latent(parallel(graph, mode="manual", ulysses=2))
    sampler = graph["sampler"]["inputs"]
    inputs = {
        "model": ["model", 0],
        "model_2": ["model", 0],
        "seed": seed,
        "steps": STEPS,
        "cancel_after": cancel_after,
    }
    inputs |= {"positive": sampler["positive"], "latent": sampler["latent_image"]}
    if lora is not None:
        ring = graph["config"]["inputs"] | {"ulysses": 1, "ring": 2}
        graph["config 2"] = {"class_type": "SPConfig", "inputs": ring}
        loader = graph["model"]["inputs"] | {"sp_config": ["config 2", 0]}
        graph["model 2"] = {"class_type": "ParallelFluxLoader", "inputs": loader}
        lora_inputs = {"model": ["model 2", 0], "lora_name": lora, "strength_model": 1.0}
        graph["lora"] = {"class_type": "LoraLoaderModelOnly", "inputs": lora_inputs}
        inputs["model_2"] = ["lora", 0]
    graph["sampler"] = {"class_type": "SampleInTurn", "inputs": inputs}
    graph["save 2"] = {"class_type": "SaveLatent", "inputs": {"samples": ["sampler", 1], "filename_prefix": "second"}}
    return graph


def test_each_of_two_runs_has_its_own_plan_and_patches_whoever_steps_in_between(
    client: ComfyClient, comfy_server: ComfyServer, tiny_models: TinyModels, lora: str
) -> None:
    plain = latent_of(client, graph_of(tiny_models, seed=901))
    changed = latent_of(client, with_lora(graph_of(tiny_models, seed=901), lora))
    assert relative_error(changed, plain) > 0.1, "the LoRA changes nothing, so this shows nothing"
    result = client.queue(in_turn(graph_of(tiny_models, seed=901), lora, seed=901))
    assert relative_error(saved_latent(client, result), plain) <= TOLERANCE
    assert relative_error(saved_latent(client, result, node="save 2"), changed) <= TOLERANCE
    (pool,) = [each for each in client.get("/parallel_dit/state")["pools"] if each["state"] != "stopped"]
    degrees = {(plan["ulysses"], plan["ring"]) for plan in pool["plans"]}
    assert {(2, 1), (1, 2)} <= degrees, "the runs did not have plans of their own"
    pids = worker_pids(comfy_server)
    cut = client.queue(in_turn(graph_of(tiny_models, seed=901), lora, seed=901, cancel_after=2))
    assert relative_error(saved_latent(client, cut), plain) <= TOLERANCE, "a cancelled run left something behind"
    assert worker_pids(comfy_server) == pids
