"""Parallel Flux Sampler with its loop in the workers: the latent of stock KSampler, and a report of where it ran."""

from __future__ import annotations

from host import workflows
from host.client import ComfyClient, PromptResult, Workflow
from host.pack_workflows import TOLERANCE, latent_of, parallel, relative_error, saved_latent, to_latent
from host.tiny_models import TinyModels
from parity.edits import LONG, guided, on_model, on_positive
from parity.graphs import of
from parity.runner import VISIBLE, prepare

STRENGTH_0 = of("", "strength 0", on_positive("ConditioningSetAreaStrength", strength=0.0))
# Numbers for each sigma serve every model sampling; they scale the latent, weigh what the model says, or read it as the
# picture.
V_PREDICTION = on_model("ModelSamplingDiscrete", sampling="v_prediction", zsnr=False)


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


def test_a_sampler_with_noise_runs_in_the_workers(client: ComfyClient, tiny_models: TinyModels) -> None:
    """test_traced_recurrences.py holds every sampler's recurrence to the sampler."""
    report = compare(client, workflows.text_to_image(tiny_models, steps=4, sampler="dpmpp_2m_sde"))
    assert report["loop"]["kind"] == "resident", report["loop"]
    assert len(report["timings"]["step_s"]) == report["sampling"]["steps"] == 4
    assert all(len(rank["busy_s"]) == 4 for rank in report["ranks"])
    assert report["timings"]["prepare_s"] > 0
    assert report["timings"]["calls"] == [4], "one request, with all calls of the model"


def test_two_conditionings_a_step_run_in_batch_groups_over_sharded_weights(
    client: ComfyClient, tiny_models: TinyModels
) -> None:
    graph = workflows.with_cfg(workflows.text_to_image(tiny_models, steps=3, batch=2), 3.0, negative="blurry " * 300)
    plan = {"devices": "cpu:4", "mode": "manual", "cfg": 2, "ulysses": 2, "weights": "sharded"}
    assert compare(client, graph, **plan)["loop"]["kind"] == "resident"


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


def test_other_model_samplings_run_in_the_workers(client: ComfyClient, tiny_models: TinyModels) -> None:
    prepare(client, tiny_models)
    graph, plain = (of("", "v", guided(3.0, negative=LONG), *edits).workflow() for edits in ([V_PREDICTION], []))
    assert compare(client, graph)["loop"] == {"kind": "resident"}
    assert relative_error(latent_of(client, graph), latent_of(client, plain)) > VISIBLE


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


def test_what_the_workers_cannot_do_alone_stays_in_comfyui_and_is_told_on_the_node(
    client: ComfyClient, tiny_models: TinyModels
) -> None:
    prepare(client, tiny_models)
    stock = client.queue(STRENGTH_0.workflow())
    ours = client.queue(in_pool(STRENGTH_0.workflow()))
    assert relative_error(saved_latent(client, ours), saved_latent(client, stock)) <= TOLERANCE
    loop = report_of(ours)["loop"]
    assert loop["kind"] == "host"
    assert "a conditioning has a strength" in loop["reason"]
    assert ("sampler", f"The loop stays in ComfyUI: {loop['reason']}") in ours.texts


def test_the_host_loop_can_be_asked_for(client: ComfyClient, tiny_models: TinyModels) -> None:
    report = compare(client, workflows.text_to_image(tiny_models, steps=2, seed=5), loop="host")
    assert report["loop"] == {"kind": "host"}
