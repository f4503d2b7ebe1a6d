"""Parallel Sampler's loop in the workers where ComfyUI's own module computes: stock KSampler's latent, and what a
report says of runs that stay in ComfyUI's loop.

Owns: which families, samplers and inputs run there, each with a run that is wrong on purpose. Does not own: the loop
itself (comfy/test_nodes_in_worker_sampling.py has it for Flux.1), nor the recurrences of samplers.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import save_file

from host.adapters import write_adapter
from host.client import ComfyClient, Event, PromptResult, Workflow
from host.formats import same_picture
from host.pack_workflows import TOLERANCE, latent_of, relative_error, saved_latent
from host.quantised import quantised
from host.server import ComfyServer
from host.workers import worker_pids
from parity.runner import parallelized, progress_of, switched_off

from .cases import PLANS
from .conftest import Stock
from .graphs import node
from .hosted import VISIBLE, between, with_loras
from .quantised import ROUNDED
from .variants import BY_NAME, write_families

WAN, KOALA = BY_NAME["wan 2.1 t2v"], BY_NAME["sdxl koala"]
PLAN = "ulysses 2"
LORA = "loop_lora.safetensors"
PIPELINE: dict[str, Any] = {"devices": "cpu:4", "pipefusion": 2, "patches": 2, "warmup_steps": 2}
FEW: dict[str, Any] = {"devices": "cpu:4", "data": 2}
# By name: a plan, a cfg scale. One that scales the latent for the model, one with timesteps of its own for a part of
# the latent, one with a picture beside the latent, one of two latents.
RUNS = {
    "wan 2.1 i2v": (PLAN, 3.0),
    "wan 2.2 5b i2v": (PLAN, 1.0),
    "sdxl koala": ("cfg 2", 7.0),
    "ltx-2 t2v": ("cfg 2 x ulysses 2", 3.0),
}
MORE = {name: ("cfg 2 x ulysses 2, sharded", 3.0) for name in BY_NAME if name not in RUNS}
STAY = {"wan 2.1 scail", "wan 2.1 scail-2"}  # poses for some steps only
# U-Nets, which share no tokens; an image's frames on one rank.
UNETS = {"sd1.5": ("cfg 2", 7.0), "sdxl": ("cfg 2, sharded", 7.0), "svd": ("cfg 2", 2.5)}
UNET_PLANS = {"cfg 2, sharded": {"devices": "cpu:4", "cfg": 2, "weights": "sharded"}}
SAMPLERS = ("dpmpp_2m_sde", "heun", "euler_ancestral", "uni_pc", "res_multistep", "lcm", "dpmpp_3m_sde", "sa_solver")


def small(name: str, *, cfg: float = 3.0, steps: int = 3, **sampler: Any) -> Workflow:
    """A stock graph; `sampler` are other inputs of KSampler."""
    graph = BY_NAME[name].graph(cfg=cfg, steps=steps)
    graph["sampler"]["inputs"] |= sampler
    return graph


def ours(graph: Workflow, plan: str | dict[str, Any] = PLAN, *, loop: str = "auto") -> Workflow:
    """The same graph with our loader and our sampler."""
    degrees = {**PLANS, **UNET_PLANS}[plan] if isinstance(plan, str) else plan
    graph = parallelized(graph, **degrees)
    graph["sampler"]["class_type"] = "ParallelSampler"
    graph["sampler"]["inputs"]["loop"] = loop
    return graph


def wrong(graph: Workflow, way: str) -> Workflow:
    """The same graph of ours, its loop in the workers wrong on purpose."""
    return between(graph, "wrong", "SwitchLoopWrong", way=way)


def loop_of(result: PromptResult) -> dict[str, str]:
    """Where the loop was, says the report."""
    return result.require_success().outputs["sampler"]["parallel_dit"][0]["loop"]


def check(client: ComfyClient, stock: Stock, graph: Workflow, plan: str | dict[str, Any] = PLAN) -> PromptResult:
    """Our run, which equals stock's and had its loop in the workers."""
    result = client.queue(ours(graph, plan))
    assert loop_of(result) == {"kind": "resident"}
    assert relative_error(saved_latent(client, result), stock(graph)) <= TOLERANCE
    return result


@pytest.mark.parametrize("name", RUNS)
def test_a_model_samples_in_the_workers_as_stock_does_and_wrong_runs_are_seen(
    name: str, hosted_client: ComfyClient
) -> None:
    plan, cfg = RUNS[name]
    errors = compared(hosted_client, name, plan, cfg)
    assert max(errors["ours"]) <= TOLERANCE
    assert min(errors["wrong"]) > VISIBLE


@pytest.mark.full
@pytest.mark.parametrize("name", MORE)
def test_every_other_variant_does(name: str, hosted_client: ComfyClient, family_models: Path) -> None:
    write_families(family_models, only=[name])
    plan, cfg = UNETS.get(name, MORE[name])
    errors = compared(hosted_client, name, plan, cfg, loop="host" if name in STAY else "resident")
    print(f"{name} | {plan} | cfg {cfg:g} | {max(errors['ours']):.1e} | {min(errors['wrong']):.1e}")  # noqa: T201
    assert max(errors["ours"]) <= TOLERANCE
    assert name in STAY or min(errors["wrong"]) > VISIBLE


def compared(
    client: ComfyClient, name: str, plan: str, cfg: float, *, loop: str = "resident"
) -> dict[str, list[float]]:
    """Relative errors of a variant's latents beside stock's: of our run, and of one that is wrong on purpose."""
    graph, variant = small(name, cfg=cfg), BY_NAME[name]
    stock = client.queue(graph).require_success()
    mine = ours(graph, plan)
    way = "local_attention" if "ulysses" in plan else "one_side"
    found: dict[str, list[float]] = {}
    for kind, run in (("ours", mine), ("wrong", wrong(mine, way))):
        result = client.queue(run)
        assert loop_of(result)["kind"] == loop, loop_of(result)
        latents = [[saved_latent(client, each, node=saves) for each in (result, stock)] for saves in variant.latents]
        found[kind] = [relative_error(*pair) for pair in latents]
        assert len(result.previews) == len(stock.previews) == 3 * variant.shown
        told = [[each for each in progress_of(run) if each[0] == "sampler"] for run in (result, stock)]
        assert told[0] == told[1]
    return found


@pytest.mark.parametrize(
    "sampler", [pytest.param(name, marks=[pytest.mark.full] if number else []) for number, name in enumerate(SAMPLERS)]
)
@pytest.mark.parametrize("name", [WAN.name, pytest.param(KOALA.name, marks=[pytest.mark.full])])
def test_samplers_run_in_the_workers(name: str, sampler: str, hosted_client: ComfyClient, stock: Stock) -> None:
    graph = small(name, steps=4, sampler_name=sampler)
    check(hosted_client, stock, graph, "cfg 2" if name == KOALA.name else PLAN)


def test_a_lora_and_a_part_of_the_steps(hosted_client: ComfyClient, stock: Stock, family_models: Path) -> None:
    modules = {"blocks.0.self_attn.q": (120, 120), "blocks.2.cross_attn.v": (120, 120)}
    write_adapter(family_models / "loras" / LORA, "lora_alpha", modules)
    graph = with_loras(small(WAN.name, steps=4, denoise=0.6), (LORA, 0.8))
    check(hosted_client, stock, graph)
    plain = small(WAN.name, steps=4, denoise=0.6)
    assert relative_error(stock(plain), stock(graph)) > VISIBLE


MASKED = {"wan 2.1 t2v": PLAN, "sdxl koala": "cfg 2", "ltx-video t2v": PLAN, "wan 2.2 5b t2v": PLAN}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in RUNS else [pytest.mark.full]) for name in MASKED]
)
def test_a_noise_mask(name: str, hosted_client: ComfyClient, stock: Stock) -> None:
    """Families noise what a mask keeps in their own ways; latents here are those of an earlier run."""
    plain = small(name, steps=2)
    graph = copy.deepcopy(plain)
    graph["first"] = copy.deepcopy(graph["sampler"])
    graph["mask"] = node("SolidMask", value=0.7, width=56, height=40)
    graph["masked"] = node("SetLatentNoiseMask", samples=["first", 0], mask=["mask", 0])
    graph["sampler"]["inputs"] |= {"latent_image": ["masked", 0], "denoise": 0.7, "steps": 3}
    check(hosted_client, stock, graph, MASKED[name])
    unmasked = copy.deepcopy(graph)
    unmasked["sampler"]["inputs"]["latent_image"] = ["first", 0]
    assert relative_error(stock(unmasked), stock(graph)) > VISIBLE


def test_a_noise_mask_of_a_video_with_sound_is_sampled_wherever_the_loop_is(
    hosted_client: ComfyClient, stock: Stock
) -> None:
    """What such a class says of a mask may need both parts of the latent, of their sizes."""
    graph = small("minimax h3 t2v", steps=2)
    plain = stock(graph)
    graph["mask"] = node("SolidMask", value=0.7, width=56, height=40)
    graph["parts"] = node("LTXVSeparateAVLatent", av_latent=graph["sampler"]["inputs"]["latent_image"])
    graph["masked"] = node("SetLatentNoiseMask", samples=["parts", 0], mask=["mask", 0])
    graph["joined"] = node("LTXVConcatAVLatent", video_latent=["masked", 0], audio_latent=["parts", 1])
    graph["sampler"]["inputs"]["latent_image"] = ["joined", 0]
    found = saved_latent(hosted_client, hosted_client.queue(ours(graph)))
    assert relative_error(found, stock(graph)) <= TOLERANCE
    assert relative_error(plain, stock(graph)) > VISIBLE


@pytest.mark.parametrize("plan", ["cfg 2", {**FEW}], ids=str)
def test_a_batch_whose_images_have_texts_of_their_own(
    plan: str | dict[str, Any], hosted_client: ComfyClient, stock: Stock
) -> None:
    graph = small(WAN.name, steps=2)
    graph["latent"]["inputs"]["batch_size"] = 2
    for name in ("positive", "negative"):
        graph[name]["inputs"]["batch"] = 2
    latents = stock(graph)
    check(hosted_client, stock, graph, plan)
    one_text = copy.deepcopy(graph)
    for name in ("positive", "negative"):
        one_text[name]["inputs"]["batch"] = 1
    assert relative_error(stock(one_text)[1], latents[1]) > VISIBLE


def test_a_video_of_one_frame_and_a_size_that_patches_do_not_divide(hosted_client: ComfyClient, stock: Stock) -> None:
    for size in ({"length": 1}, {"width": 120, "height": 72, "length": 1}):
        graph = small(WAN.name, steps=2)
        graph["latent"]["inputs"] |= size
        result = check(hosted_client, stock, graph)
        assert saved_latent(hosted_client, result).shape[2] == 1


def test_idle_ranks_keep_up_with_the_others(hosted_client: ComfyClient, stock: Stock) -> None:
    """At cfg 1 half of the ranks have nothing to do but to put sharded blocks together with the rest."""
    check(hosted_client, stock, small(WAN.name, cfg=1.0, steps=2), "cfg 2 x ulysses 2, sharded")


def controlled(graph: Workflow) -> Workflow:
    """With a second prompt beside the first."""
    graph["both"] = node("ConditioningCombine", conditioning_1=["positive", 0], conditioning_2=["negative", 0])
    graph["sampler"]["inputs"]["positive"] = ["both", 0]
    return graph


def post_cfg(graph: Workflow) -> Workflow:
    """With a node that changes the cfg function."""
    return between(graph, "rescale", "RescaleCFG", multiplier=0.7)


def skipping(graph: Workflow) -> Workflow:
    """With a wrapper that skips steps and logs each."""
    inputs = {"reuse_threshold": 0.2, "start_percent": 0.15, "end_percent": 0.95, "verbose": True}
    return between(graph, "cache", "EasyCache", **inputs)


def partly(graph: Workflow) -> Workflow:
    """With a prompt for the first step alone."""
    graph["first"] = node("ConditioningSetTimestepRange", conditioning=["positive", 0], start=0.0, end=0.1)
    graph["sampler"]["inputs"]["positive"] = ["first", 0]
    return graph


def cfg_plus_plus(graph: Workflow) -> Workflow:
    """With a sampler that reads the negative side apart."""
    graph["sampler"]["inputs"]["sampler_name"] = "euler_cfg_pp"
    return graph


STAYS = {
    "two prompts on one side": (controlled, "the positive conditioning has 2 parts"),
    "another cfg function": (post_cfg, "a node replaces the cfg function"),
    "a step cache that logs": (skipping, "a node wraps the model's calls (easycache)"),
    "some steps only": (partly, "a conditioning is for some steps only"),
    "cfg++": (cfg_plus_plus, "the sampler cannot be written as numbers"),
}


@pytest.mark.parametrize("name", STAYS)
def test_what_needs_comfyui_at_each_step_stays_there_and_is_told(
    name: str, hosted_client: ComfyClient, stock: Stock
) -> None:
    edit, reason = STAYS[name]
    graph = edit(small(WAN.name, steps=2))
    result = hosted_client.queue(ours(graph))
    loop = loop_of(result)
    assert loop["kind"] == "host" and reason in loop["reason"], loop
    assert ("sampler", f"The loop stays in ComfyUI: {loop['reason']}") in result.texts
    assert relative_error(saved_latent(hosted_client, result), stock(graph)) <= TOLERANCE


def test_a_prompt_whose_range_holds_all_steps_runs_in_the_workers(hosted_client: ComfyClient, stock: Stock) -> None:
    graph = partly(small(WAN.name, steps=2))
    graph["first"]["inputs"]["end"] = 1.0
    check(hosted_client, stock, graph)


def test_a_file_whose_layers_round_all_rows_of_a_step_together_keeps_them_together(
    hosted_client: ComfyClient, family_models: Path
) -> None:
    """Both prompts go through such layers in one call, and share what they are rounded by; ranks of cfg have one each.

    A last digit moves what such layers make by a whole step, which cfg 3 enlarges, by how much differs by processor.
    """
    path = family_models / "diffusion_models" / "loop_int8.safetensors"
    with safe_open(path.with_name(WAN.file), framework="pt") as file:
        tensors, said = quantised({name: file.get_tensor(name) for name in file.keys()}, "int8")
        save_file(tensors, path, metadata=(file.metadata() or {}) | said)
    together = "layers of the file's format round all rows of a step by one scale"
    graph = small(WAN.name, steps=2)
    graph["model"]["inputs"]["unet_name"] = path.name
    right, allowed = same_picture(hosted_client, graph, least=ROUNDED)
    for plan, reason in ((PLAN, None), ("cfg 2", together)):
        result = hosted_client.queue(ours(graph, plan))
        assert loop_of(result).get("reason") == reason
        assert relative_error(saved_latent(hosted_client, result), right) <= allowed
    wrong_on_purpose = latent_of(hosted_client, switched_off(ours(graph)))
    assert relative_error(wrong_on_purpose, right) > 2 * allowed, "a wrong plan would pass"
    path.unlink()


@pytest.mark.parametrize("cfg", [3.0, pytest.param(1.0, marks=[pytest.mark.full])])
def test_a_pipeline_stays_full_and_computes_what_it_does_step_by_step(
    cfg: float, hosted_client: ComfyClient, stock: Stock
) -> None:
    graph, plan = small(WAN.name, steps=4, cfg=cfg), {**PIPELINE, "warmup_steps": 1}
    full = hosted_client.queue(ours(graph, plan))
    assert loop_of(full) == {"kind": "resident"}
    latent = saved_latent(hosted_client, full)
    assert relative_error(latent, latent_of(hosted_client, ours(graph, plan, loop="host"))) <= TOLERANCE
    assert relative_error(latent, stock(graph)) > 1e-5  # its keys are older
    check(hosted_client, stock, graph, {**PIPELINE, "warmup_steps": 4})


def test_a_pipeline_whose_patches_share_numbers_says_so(hosted_client: ComfyClient, stock: Stock) -> None:
    graph = small(WAN.name, steps=2)
    graph["latent"]["inputs"] |= {"width": 120, "height": 72, "length": 1}
    result = hosted_client.queue(ours(graph, PIPELINE))
    why = "the pipeline is empty between steps: WanModel mixes the tokens of patches outside of its blocks"
    assert loop_of(result) == {"kind": "resident", "reason": why}
    assert ("sampler", why) in result.texts
    assert relative_error(saved_latent(hosted_client, result), stock(graph)) <= TOLERANCE


def test_the_host_loop_can_be_asked_for(hosted_client: ComfyClient, stock: Stock) -> None:
    graph = small(WAN.name, steps=2)
    result = hosted_client.queue(ours(graph, loop="host"))
    assert loop_of(result) == {"kind": "host"}
    assert relative_error(saved_latent(hosted_client, result), stock(graph)) <= TOLERANCE


@pytest.mark.parametrize("plan", ["cfg 2 x ulysses 2", pytest.param(PLAN, marks=[pytest.mark.full])])
def test_cancel_in_the_middle_keeps_the_workers_and_the_next_prompt_right(
    plan: str, hosted_client: ComfyClient, hosted_server: ComfyServer, stock: Stock
) -> None:
    graph = small(WAN.name, steps=2)
    check(hosted_client, stock, graph, plan)
    pids = worker_pids(hosted_server)

    def on_event(event: Event) -> None:
        if event.type == "progress" and event.data["value"] == 3:
            hosted_client.interrupt()

    result = hosted_client.queue(ours(small(WAN.name, steps=300), plan), on_event=on_event)
    assert result.status == "interrupted"
    assert 3 <= result.progress[-1].value < 300
    again = small(WAN.name, steps=2, denoise=0.99999)  # another cache key, the same steps
    result = hosted_client.queue(ours(again, plan))
    assert loop_of(result) == {"kind": "resident"}
    assert relative_error(saved_latent(hosted_client, result), stock(again)) <= TOLERANCE
    assert worker_pids(hosted_server) == pids
