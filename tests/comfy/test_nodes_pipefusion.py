"""PipeFusion from ComfyUI: exact while every step is warm-up, a step old afterwards, and refused where it cannot be."""

from __future__ import annotations

import copy

import pytest
import torch

from host import workflows
from host.client import ComfyClient, Workflow
from host.pack_workflows import TOLERANCE, latent_of, parallel, relative_error, saved_latent, to_latent
from host.tiny_models import TinyModels

STEPS = 4


def piped(graph: Workflow, sampler: str, **plan: object) -> Workflow:
    """The same graph over two stages."""
    plan = {"devices": "cpu:2", "mode": "manual", "pipefusion": 2} | plan
    return parallel(graph, sampler=sampler, **plan)


def runs(client: ComfyClient, graph: Workflow, **plan: object) -> dict[str, torch.Tensor]:
    """The latent of a pipeline in ComfyUI's loop and in the workers' own."""
    host, ours = (client.queue(piped(graph, sampler, **plan)) for sampler in ("KSampler", "ParallelFluxSampler"))
    latents = {"ComfyUI's": saved_latent(client, host), "the workers'": saved_latent(client, ours)}
    (report,) = ours.outputs["sampler"]["parallel_dit"]
    assert report["loop"] == {"kind": "resident"}
    return latents


def test_a_pipeline_equals_stock_comfyui_while_it_warms_up(client: ComfyClient, tiny_models: TinyModels) -> None:
    graph = workflows.text_to_image(tiny_models, steps=STEPS)
    stock = latent_of(client, graph)
    for loop, latent in runs(client, to_latent(graph), warmup_steps=STEPS).items():
        assert relative_error(latent, stock) <= TOLERANCE, loop


@pytest.mark.full
def test_after_its_warm_up_a_pipeline_equals_stock_comfyui_with_keys_of_the_step_before(
    client: ComfyClient, tiny_models: TinyModels
) -> None:
    """In either loop, so both make the same picture; stock's own, to which PipeFusion only comes near, is another."""
    graph = workflows.text_to_image(tiny_models, steps=STEPS)
    stale = copy.deepcopy(graph)
    stale["old"] = {"class_type": "UseOldKeys", "inputs": {"model": ["model", 0], "patches": 3, "warm_calls": 1}}
    stale["sampler"]["inputs"]["model"] = ["old", 0]
    expected, stock = latent_of(client, stale), latent_of(client, graph)
    assert relative_error(expected, stock) > 100 * TOLERANCE
    latents = runs(client, to_latent(graph), warmup_steps=1, patches=3)
    for loop, latent in latents.items():
        assert relative_error(latent, expected) <= TOLERANCE, loop
    assert relative_error(*latents.values()) <= TOLERANCE


def test_more_stages_than_blocks_are_refused_by_the_loader(client: ComfyClient, tiny_models: TinyModels) -> None:
    graph = to_latent(workflows.text_to_image(tiny_models, steps=STEPS))
    result = client.queue(piped(graph, "KSampler", devices="cpu:8", pipefusion=8))
    assert (result.status, result.error_node) == ("error", "ParallelFluxLoader")
    assert result.error_message.startswith("pipefusion=8 is more stages than the model's 4 blocks")
