"""Parallel Flux Sampler with its loop in the workers: the latent of stock KSampler, and a report of where it ran."""

from __future__ import annotations

import pytest

from host import workflows
from host.client import ComfyClient, PromptResult, Workflow
from host.pack_workflows import TOLERANCE, latent_of, parallel, relative_error, saved_latent, to_latent
from host.tiny_models import TinyModels
from parity.edits import LONG, Edit, guided, on_model, on_positive
from parity.graphs import Graph, of
from parity.runner import VISIBLE, prepare

from .test_nodes_parity import of_file, with_cfg, with_reference

# token-wise samplers that people use, one that looks back, one with two calls a step, some with noise of their own
SAMPLERS = ("euler", "euler_ancestral", "heun", "dpmpp_2m", "dpmpp_2m_sde", "lcm", "uni_pc", "res_multistep")

STRENGTH_0 = of("", "strength 0", on_positive("ConditioningSetAreaStrength", strength=0.0))


def sampled_as(kind: str, *edits: Edit) -> Graph:
    """Under another model sampling, of those that stock's node offers."""
    return of("", kind, *edits, on_model("ModelSamplingDiscrete", sampling=kind, zsnr=False))


# Numbers for each sigma serve them all; they scale the latent, weigh what the model says, or read it as the picture.
SAMPLINGS = (
    sampled_as("v_prediction", guided(3.0, negative=LONG)),
    sampled_as("eps"),
    sampled_as("lcm"),
    sampled_as("img_to_img_flow"),
)
STAYS = {
    "a strength of 0": (STRENGTH_0, "a conditioning has a strength"),
}


def in_pool(graph: Workflow, *, loop: str = "auto", modulations: str = "keep", **plan: object) -> Workflow:
    """The same graph with our loader and our sampler."""
    graph = parallel(graph, sampler="ParallelFluxSampler", **plan)
    graph["sampler"]["inputs"] |= {"loop": loop, "modulations": modulations}
    return graph


def report_of(result: PromptResult) -> dict:
    """What the sampler measured."""
    return result.require_success().outputs["sampler"]["parallel_dit"][0]


def compare(client: ComfyClient, graph: Workflow, **options: object) -> dict:
    """Hold our latent, progress and previews against stock's; the report."""
    stock = client.queue(to_latent(graph))
    ours = client.queue(to_latent(in_pool(graph, **options)))
    assert relative_error(saved_latent(client, ours), saved_latent(client, stock)) <= TOLERANCE
    assert [(each.value, each.max) for each in ours.progress if each.node == "sampler"] == [
        (each.value, each.max) for each in stock.progress if each.node == "sampler"
    ]
    assert len(ours.previews) == len(stock.previews) > 0
    return report_of(ours)


# test_traced_recurrences.py holds every sampler's recurrence to the sampler; here those with noise and with two calls
# run.
@pytest.mark.parametrize(
    "sampler",
    [pytest.param(name, marks=[] if name == "dpmpp_2m_sde" else [pytest.mark.full]) for name in SAMPLERS],
)
def test_samplers_run_in_the_workers(client: ComfyClient, tiny_models: TinyModels, sampler: str) -> None:
    report = compare(client, workflows.text_to_image(tiny_models, steps=4, sampler=sampler))
    assert report["loop"]["kind"] == "resident", report["loop"]
    assert len(report["timings"]["step_s"]) == report["sampling"]["steps"] == 4
    assert all(len(rank["busy_s"]) == 4 for rank in report["ranks"])
    assert report["timings"]["prepare_s"] > 0
    assert report["timings"]["calls"] == [7 if sampler == "heun" else 4], "one request, with all calls of the model"


@pytest.mark.parametrize(
    ("devices", "degrees"),
    [
        pytest.param("cpu:2", {"ring": 2}, marks=pytest.mark.full),
        pytest.param("cpu:3", {"ring": 3}, marks=pytest.mark.full),
        pytest.param("cpu:2", {"cfg": 2}, marks=pytest.mark.full),
        ("cpu:4", {"cfg": 2, "ulysses": 2, "weights": "sharded"}),
        pytest.param("cpu:2", {"data": 2}, marks=pytest.mark.full),
    ],
)
def test_every_kind_of_plan_runs_the_loop(
    client: ComfyClient, tiny_models: TinyModels, devices: str, degrees: dict
) -> None:
    graph = with_cfg(workflows.text_to_image(tiny_models, steps=3, batch=2), 3.0, negative="blurry " * 300)
    report = compare(client, graph, devices=devices, mode="manual", **degrees)
    assert report["loop"]["kind"] == "resident", report["loop"]


@pytest.mark.full
def test_fill_kontext_and_schnell_run_in_the_workers(client: ComfyClient, tiny_models: TinyModels, hint: str) -> None:
    dev = workflows.text_to_image(tiny_models)
    for graph in (workflows.fill(tiny_models, hint), with_reference(dev, hint), workflows.schnell(tiny_models)):
        report = compare(client, graph)
        assert report["loop"]["kind"] == "resident", report["loop"]


def test_a_noise_mask_and_a_part_of_the_steps_run_in_the_workers(
    client: ComfyClient, tiny_models: TinyModels, hint: str
) -> None:
    graph = workflows.with_image(workflows.text_to_image(tiny_models, steps=5), hint)
    graph["encode"] = {"class_type": "VAEEncode", "inputs": {"pixels": ["image", 0], "vae": ["vae", 0]}}
    graph["mask"] = {"class_type": "SolidMask", "inputs": {"value": 0.7, "width": 64, "height": 64}}
    graph["masked"] = {"class_type": "SetLatentNoiseMask", "inputs": {"samples": ["encode", 0], "mask": ["mask", 0]}}
    graph["sampler"]["inputs"] |= {"latent_image": ["masked", 0], "denoise": 0.6}
    report = compare(client, graph)
    assert report["loop"]["kind"] == "resident", report["loop"]


@pytest.mark.parametrize(
    "graph",
    [pytest.param(each, marks=[pytest.mark.full] if number else []) for number, each in enumerate(SAMPLINGS)],
    ids=lambda graph: graph.name,
)
def test_other_model_samplings_run_in_the_workers(graph: Graph, client: ComfyClient, tiny_models: TinyModels) -> None:
    prepare(client, tiny_models)
    plain = of("", "plain", *graph.edits[:-1])
    report = compare(client, graph.workflow())
    assert report["loop"] == {"kind": "resident"}
    assert relative_error(latent_of(client, graph.workflow()), latent_of(client, plain.workflow())) > VISIBLE


def test_modulations_set_to_release_by_a_saved_workflow_change_nothing(
    client: ComfyClient, tiny_models: TinyModels
) -> None:
    graph = of_file(workflows.text_to_image(tiny_models), tiny_models.dev_saved)
    report = compare(client, graph, modulations="release")
    assert report["loop"]["kind"] == "resident"
    assert not any("released_bytes" in rank for rank in report["ranks"])


def test_a_sampler_that_cannot_live_there_stays_in_comfyui_and_says_so(
    client: ComfyClient, tiny_models: TinyModels
) -> None:
    """`test_traced_recurrences.py` has all of them; dpm_adaptive, the other kind, would take fifty calls here."""
    report = compare(client, workflows.text_to_image(tiny_models, steps=3, sampler="euler_cfg_pp"))
    assert report["loop"]["kind"] == "host"
    assert "the sampler cannot be written as numbers" in report["loop"]["reason"]


@pytest.mark.full
def test_a_controlnet_stays_in_comfyui_and_an_odd_latent_does_not(
    client: ComfyClient, tiny_models: TinyModels, hint: str
) -> None:
    dev = workflows.text_to_image(tiny_models)
    controlled = workflows.with_controlnet(dev, tiny_models, tiny_models.controlnet_xlabs, hint)
    assert compare(client, controlled)["loop"]["reason"] == "a ControlNet"
    odd = workflows.text_to_image(tiny_models, width=200, height=328)
    assert compare(client, odd)["loop"]["kind"] == "resident"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] if index else []) for index, name in enumerate(STAYS)]
)
def test_what_the_workers_cannot_do_alone_stays_in_comfyui_and_is_told_on_the_node(
    client: ComfyClient, tiny_models: TinyModels, name: str
) -> None:
    prepare(client, tiny_models)
    graph, reason = STAYS[name]
    stock = client.queue(graph.workflow())
    ours = client.queue(in_pool(graph.workflow()))
    assert relative_error(saved_latent(client, ours), saved_latent(client, stock)) <= TOLERANCE
    loop = report_of(ours)["loop"]
    assert loop["kind"] == "host"
    assert reason in loop["reason"]
    assert ("sampler", f"The loop stays in ComfyUI: {loop['reason']}") in ours.texts


def test_the_host_loop_can_be_asked_for(client: ComfyClient, tiny_models: TinyModels) -> None:
    report = compare(client, workflows.text_to_image(tiny_models, steps=2, seed=5), loop="host")
    assert report["loop"] == {"kind": "host"}
