"""Parallel Sampler's loop in the workers where ComfyUI's own module computes: stock KSampler's latent, and what a
report says of runs that stay in ComfyUI's loop.
"""

from pathlib import Path
from typing import Any

import pytest
from rounding import ROUNDING
from safetensors import safe_open
from safetensors.torch import save_file

from host.client import ComfyClient, Workflow
from host.formats import same_picture
from host.pack_workflows import latent_of, relative_error, saved_latent
from host.quantised import quantised
from parity.runner import parallelized, progress_of, switched_off

from .cases import PLANS
from .conftest import Stock
from .graphs import node
from .hosted import VISIBLE, between
from .quantised import ROUNDED
from .variants import BY_NAME

WAN = BY_NAME["wan 2.1 t2v"]
PLAN = "ulysses 2"
PIPELINE: dict[str, Any] = {"devices": "cpu:4", "pipefusion": 2, "patches": 2, "warmup_steps": 2}
# By name: a plan, a cfg scale. One that scales the latent for the model, one with timesteps of its own for a part of
# the latent, one with a picture beside the latent, one of two latents.
RUNS = {
    "wan 2.1 i2v": (PLAN, 3.0),
    "wan 2.2 5b i2v": (PLAN, 1.0),
    "sdxl koala": ("cfg 2", 7.0),
    "ltx-2 t2v": ("cfg 2 x ulysses 2", 3.0),
}


def small(name: str, *, cfg: float = 3.0, steps: int = 2) -> Workflow:
    return BY_NAME[name].graph(cfg=cfg, steps=steps)


def ours(graph: Workflow, plan: str | dict[str, Any] = PLAN) -> Workflow:
    graph = parallelized(graph, **(PLANS[plan] if isinstance(plan, str) else plan))
    graph["sampler"]["class_type"] = "ParallelSampler"
    return graph


@pytest.mark.parametrize("name", RUNS)
def test_a_model_samples_in_the_workers_as_stock_does_and_wrong_runs_are_seen(
    name: str, hosted_client: ComfyClient
) -> None:
    plan, cfg = RUNS[name]
    client, graph, variant = hosted_client, small(name, cfg=cfg, steps=3), BY_NAME[name]
    stock = client.queue(graph).require_success()
    mine = ours(graph, plan)
    way = "local_attention" if "ulysses" in plan else "one_side"
    for kind, run in (("ours", mine), ("wrong", between(mine, "wrong", "SwitchLoopWrong", way=way))):
        result = client.queue(run)
        assert result.report()["loop"] == {"kind": "resident"}
        latents = [[saved_latent(client, each, node=saves) for each in (result, stock)] for saves in variant.latents]
        errors = [relative_error(*pair) for pair in latents]
        assert max(errors) <= ROUNDING if kind == "ours" else min(errors) > VISIBLE, (kind, errors)
        assert len(result.previews) == len(stock.previews) == 3 * variant.shown
        told = [[each for each in progress_of(run) if each[0] == "sampler"] for run in (result, stock)]
        assert told[0] == told[1]


def test_a_noise_mask_of_a_video_with_sound_is_sampled_wherever_the_loop_is(
    hosted_client: ComfyClient, stock: Stock
) -> None:
    """What such a class says of a mask may need both parts of the latent, of their sizes."""
    graph = small("minimax h3 t2v")
    plain = stock(graph)
    graph["mask"] = node("SolidMask", value=0.7, width=56, height=40)
    graph["parts"] = node("LTXVSeparateAVLatent", av_latent=graph["sampler"]["inputs"]["latent_image"])
    graph["masked"] = node("SetLatentNoiseMask", samples=["parts", 0], mask=["mask", 0])
    graph["joined"] = node("LTXVConcatAVLatent", video_latent=["masked", 0], audio_latent=["parts", 1])
    graph["sampler"]["inputs"]["latent_image"] = ["joined", 0]
    masked = stock(graph)
    found = saved_latent(hosted_client, hosted_client.queue(ours(graph)))
    assert relative_error(found, masked) <= ROUNDING
    assert relative_error(plain, masked) > VISIBLE


def test_a_list_shows_the_steps_of_a_video_with_sound(hosted_client: ComfyClient, stock: Stock) -> None:
    """ComfyUI's samplers have its two latents packed into one, of which no picture can be made."""
    graph = small("minimax h3 t2v", steps=2)
    mine = parallelized(graph, **PLANS[PLAN])
    mine["sampler"]["class_type"] = "ParallelFluxListSampler"
    result = hosted_client.queue(mine)
    assert relative_error(saved_latent(hosted_client, result), stock(graph)) <= ROUNDING
    assert len(result.previews) == 2 * BY_NAME["minimax h3 t2v"].shown > 0


def controlled(graph: Workflow) -> Workflow:
    """With a second prompt beside the first."""
    graph["both"] = node("ConditioningCombine", conditioning_1=["positive", 0], conditioning_2=["negative", 0])
    graph["sampler"]["inputs"]["positive"] = ["both", 0]
    return graph


def partly(graph: Workflow) -> Workflow:
    """With a prompt for the first step alone."""
    graph["first"] = node("ConditioningSetTimestepRange", conditioning=["positive", 0], start=0.0, end=0.1)
    graph["sampler"]["inputs"]["positive"] = ["first", 0]
    return graph


STAYS = {
    "two prompts on one side": (controlled, "the positive conditioning has 2 parts"),
    "another cfg function": (
        lambda graph: between(graph, "rescale", "RescaleCFG", multiplier=0.7),
        "a node replaces the cfg function",
    ),
    "some steps only": (partly, "a conditioning is for some steps only"),
}


@pytest.mark.parametrize("name", STAYS)
def test_what_needs_comfyui_at_each_step_stays_there_and_is_told(
    name: str, hosted_client: ComfyClient, stock: Stock
) -> None:
    edit, reason = STAYS[name]
    graph = edit(small(WAN.name))
    result = hosted_client.queue(ours(graph))
    loop = result.report()["loop"]
    assert loop["kind"] == "host" and reason in loop["reason"], loop
    assert ("sampler", f"The loop stays in ComfyUI: {loop['reason']}") in result.texts
    assert relative_error(saved_latent(hosted_client, result), stock(graph)) <= ROUNDING


def test_a_prompt_whose_range_holds_all_steps_runs_in_the_workers(hosted_client: ComfyClient, stock: Stock) -> None:
    graph = partly(small(WAN.name))
    graph["first"]["inputs"]["end"] = 1.0
    result = hosted_client.queue(ours(graph))
    assert result.report()["loop"] == {"kind": "resident"}
    assert relative_error(saved_latent(hosted_client, result), stock(graph)) <= ROUNDING


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
    graph = small(WAN.name)
    graph["model"]["inputs"]["unet_name"] = path.name
    right, allowed = same_picture(hosted_client, graph, least=ROUNDED)
    for plan, reason in ((PLAN, None), ("cfg 2", together)):
        result = hosted_client.queue(ours(graph, plan))
        assert result.report()["loop"].get("reason") == reason
        assert relative_error(saved_latent(hosted_client, result), right) <= allowed
    wrong_on_purpose = latent_of(hosted_client, switched_off(ours(graph)))
    assert relative_error(wrong_on_purpose, right) > 2 * allowed, "a wrong plan would pass"
    path.unlink()


def test_a_pipeline_whose_patches_share_numbers_says_so(hosted_client: ComfyClient, stock: Stock) -> None:
    graph = small(WAN.name)
    graph["latent"]["inputs"] |= {"width": 120, "height": 72, "length": 1}
    result = hosted_client.queue(ours(graph, PIPELINE))
    why = "the pipeline is empty between steps: WanModel mixes the tokens of patches outside of its blocks"
    assert result.report()["loop"] == {"kind": "resident", "reason": why}
    assert ("sampler", why) in result.texts
    assert relative_error(saved_latent(hosted_client, result), stock(graph)) <= ROUNDING


def test_a_pipeline_whose_idle_stages_hold_a_part_of_the_weights_samples_in_the_workers(
    hosted_client: ComfyClient, stock: Stock
) -> None:
    """At a cfg scale of 1 one batch group has the prompt. After the warm-up a pipeline is not exact."""
    graph = small(WAN.name, cfg=1.0, steps=4)
    plan = PIPELINE | {"warmup_steps": 1, "cfg": 2, "weights": "sharded"}
    mine, theirs = (hosted_client.queue(ours(graph, plan | {"loop": loop})) for loop in ("auto", "host"))
    assert mine.report()["loop"]["kind"] == "resident" and theirs.report()["loop"] == {"kind": "host"}
    latents = [saved_latent(hosted_client, each) for each in (mine, theirs)]
    assert relative_error(*latents) <= ROUNDING
    assert relative_error(latents[0], stock(graph)) > VISIBLE, "wrong keys would not be seen"
