"""PipeFusion from ComfyUI: exact while every step is warm-up, a step old afterwards, and refused where it cannot be."""

from __future__ import annotations

import pytest

from host import workflows
from host.client import ComfyClient, Workflow
from host.pack_workflows import TOLERANCE, parallel, relative_error, saved_latent, to_latent
from host.tiny_models import TinyModels

STEPS = 4


def both(client: ComfyClient, tiny: TinyModels, sampler: str, **plan: object) -> float:
    """How far the latent of a pipeline is from stock ComfyUI's."""
    graph = to_latent(workflows.text_to_image(tiny, steps=STEPS))
    stock = saved_latent(client, client.queue(graph))
    ours = client.queue(piped(graph, sampler, **plan))
    return relative_error(saved_latent(client, ours), stock)


def piped(graph: Workflow, sampler: str, **plan: object) -> Workflow:
    """The same graph over two stages."""
    plan = {"devices": "cpu:2", "mode": "manual", "pipefusion": 2} | plan
    return parallel(graph, sampler=sampler, **plan)


@pytest.mark.parametrize("sampler", ["KSampler", "ParallelFluxSampler"])
def test_a_pipeline_equals_stock_comfyui_while_it_warms_up(
    client: ComfyClient, tiny_models: TinyModels, sampler: str
) -> None:
    assert both(client, tiny_models, sampler, warmup_steps=STEPS) <= TOLERANCE


@pytest.mark.parametrize("sampler", ["KSampler", "ParallelFluxSampler"])
def test_after_its_warm_up_a_pipeline_is_a_step_behind(
    client: ComfyClient, tiny_models: TinyModels, sampler: str
) -> None:
    error = both(client, tiny_models, sampler, warmup_steps=1, patches=3)
    assert 1e-4 < error < 0.5, "either it never went stale, or it is another picture"


def test_more_stages_than_blocks_are_refused_before_anything_starts(
    client: ComfyClient, tiny_models: TinyModels
) -> None:
    graph = to_latent(workflows.text_to_image(tiny_models, steps=STEPS))
    result = client.queue(piped(graph, "KSampler", devices="cpu:8", pipefusion=8))
    assert result.status == "error"
    assert "pipefusion=8" in result.error["exception_message"].splitlines()[0]
