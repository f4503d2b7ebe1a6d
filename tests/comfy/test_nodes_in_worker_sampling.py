"""Parallel Flux Sampler with its loop in the workers: the latent of stock KSampler, and a report of where it ran.

Does not own: what runs there of conditionings, masks and plans (families/test_hosted_loop.py).
"""

from __future__ import annotations

from host import workflows
from host.client import ComfyClient, PromptResult, Workflow
from host.pack_workflows import TOLERANCE, parallel, relative_error, saved_latent, to_latent
from host.tiny_models import TinyModels


def in_pool(graph: Workflow, *, modulations: str = "keep") -> Workflow:
    """The same graph with our loader and our sampler."""
    graph = parallel(graph, sampler="ParallelFluxSampler")
    graph["sampler"]["inputs"] |= {"loop": "auto", "modulations": modulations}
    return graph


def report_of(result: PromptResult) -> dict:
    """What the sampler measured."""
    return result.require_success().outputs["sampler"]["parallel_dit"][0]


def compare(client: ComfyClient, graph: Workflow, **options: str) -> dict:
    """Hold our latent, progress and previews against stock's; the report."""
    stock = client.queue(to_latent(graph))
    ours = client.queue(to_latent(in_pool(graph, **options)))
    assert relative_error(saved_latent(client, ours), saved_latent(client, stock)) <= TOLERANCE
    assert [(each.value, each.max) for each in ours.progress if each.node == "sampler"] == [
        (each.value, each.max) for each in stock.progress if each.node == "sampler"
    ]
    assert len(ours.previews) == len(stock.previews) > 0
    return report_of(ours)


def test_a_sampler_with_noise_runs_in_the_workers(client: ComfyClient, tiny_models: TinyModels) -> None:
    """test_traced_recurrences.py holds every sampler's recurrence to the sampler."""
    report = compare(client, workflows.text_to_image(tiny_models, steps=4, sampler="dpmpp_2m_sde"))
    assert report["loop"]["kind"] == "resident", report["loop"]
    assert len(report["timings"]["step_s"]) == report["sampling"]["steps"] == 4
    assert all(len(rank["busy_s"]) == 4 for rank in report["ranks"])
    assert report["timings"]["prepare_s"] > 0
    assert report["timings"]["calls"] == [4], "one request, with all calls of the model"


def test_modulations_set_to_release_by_a_saved_workflow_change_nothing(
    client: ComfyClient, tiny_models: TinyModels
) -> None:
    report = compare(client, workflows.text_to_image(tiny_models), modulations="release")
    assert report["loop"]["kind"] == "resident"
    assert not any("released_bytes" in rank for rank in report["ranks"])


def test_a_sampler_that_cannot_live_there_stays_in_comfyui_and_says_so(
    client: ComfyClient, tiny_models: TinyModels
) -> None:
    """`test_traced_recurrences.py` has all of them; dpm_adaptive, the other kind, would take fifty calls here."""
    report = compare(client, workflows.text_to_image(tiny_models, steps=3, sampler="euler_cfg_pp"))
    assert report["loop"]["kind"] == "host"
    assert "the sampler cannot be written as numbers" in report["loop"]["reason"]
