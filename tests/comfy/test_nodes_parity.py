"""The same graph with UNETLoader and with our loader over two ranks: equal latents, progress and previews."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from host import workflows
from host.client import ComfyClient, PromptResult, Workflow
from host.pack_workflows import TOLERANCE, latent_of, parallel, relative_error, saved_latent, to_latent
from host.tiny_models import TinyModels

Builder = Callable[[TinyModels, str], Workflow]


def with_cfg(graph: Workflow, cfg: float, *, negative: str) -> Workflow:
    """A real negative prompt at a cfg above 1: two conditionings a step."""
    graph["sampler"]["inputs"]["cfg"] = cfg
    graph["uncond"] = {"class_type": "CLIPTextEncode", "inputs": {"clip": ["clip", 0], "text": negative}}
    graph["sampler"]["inputs"]["negative"] = ["uncond", 0]
    return graph


def with_reference(graph: Workflow, image: str) -> Workflow:
    """Kontext: a reference image's latent as further tokens."""
    workflows.with_image(graph, image)
    graph["encode"] = {"class_type": "VAEEncode", "inputs": {"pixels": ["image", 0], "vae": ["vae", 0]}}
    inputs = {"conditioning": graph["sampler"]["inputs"]["positive"], "latent": ["encode", 0]}
    graph["reference"] = {"class_type": "ReferenceLatent", "inputs": inputs}
    graph["sampler"]["inputs"]["positive"] = ["reference", 0]
    return graph


def of_file(graph: Workflow, name: str) -> Workflow:
    """Another file of diffusion_models."""
    graph["model"]["inputs"]["unet_name"] = name
    return graph


GRAPHS: dict[str, Builder] = {
    "dev": lambda tiny, hint: workflows.text_to_image(tiny, steps=3),
    "odd size, batch 2": lambda tiny, hint: workflows.text_to_image(tiny, width=200, height=328, batch=2),
    "heun, two calls a step": lambda tiny, hint: workflows.text_to_image(tiny, sampler="heun"),
    "schnell": lambda tiny, hint: workflows.schnell(tiny),
    "norm keys as ComfyUI saves them": lambda tiny, hint: of_file(workflows.text_to_image(tiny), tiny.dev_saved),
    "fill": workflows.fill,
    "cfg 3": lambda tiny, hint: with_cfg(workflows.text_to_image(tiny), 3.0, negative="blurry"),
    "cfg 3, unequal prompts": lambda tiny, hint: with_cfg(workflows.text_to_image(tiny), 3.0, negative="blurry " * 300),
    "kontext reference": lambda tiny, hint: with_reference(workflows.text_to_image(tiny), hint),
    "xlabs controlnet": lambda tiny, hint: workflows.with_controlnet(
        workflows.text_to_image(tiny), tiny, tiny.controlnet_xlabs, hint
    ),
    "union controlnet, batch 2": lambda tiny, hint: workflows.with_controlnet(
        workflows.text_to_image(tiny, batch=2), tiny, tiny.controlnet_union, hint
    ),
}


def both(client: ComfyClient, stock: Workflow, ours: Workflow) -> tuple[PromptResult, PromptResult]:
    """Both runs, each up to its latent."""
    return client.queue(to_latent(stock)), client.queue(to_latent(ours))


# The others are in parity/test_parity_subset.py too.
NOT_IN_THE_SUBSET = ("odd size, batch 2", "heun, two calls a step")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in NOT_IN_THE_SUBSET else [pytest.mark.full]) for name in GRAPHS]
)
def test_two_ranks_equal_stock_comfyui(name: str, client: ComfyClient, tiny_models: TinyModels, hint: str) -> None:
    graph = GRAPHS[name](tiny_models, hint)
    stock, ours = both(client, graph, parallel(graph))
    assert "sampler" not in stock.cached + ours.cached
    assert relative_error(saved_latent(client, ours), saved_latent(client, stock)) <= TOLERANCE
    assert [(each.node, each.value, each.max) for each in ours.progress] == [
        (each.node, each.value, each.max) for each in stock.progress
    ]
    assert len(ours.previews) == len(stock.previews) > 0


@pytest.mark.parametrize(
    ("devices", "degrees"),
    [
        pytest.param("cpu:1", {}, id="one rank", marks=pytest.mark.full),
        pytest.param("cpu:2", {"ring": 2}, id="ring 2", marks=pytest.mark.full),
        pytest.param("cpu:3", {"ring": 3}, id="ring 3", marks=pytest.mark.full),
        pytest.param("cpu:4", {"ulysses": 2, "ring": 2}, id="ulysses 2 ring 2"),
    ],
)
def test_every_kind_of_plan_equals_stock_comfyui(
    devices: str, degrees: dict[str, int], client: ComfyClient, tiny_models: TinyModels
) -> None:
    graph = workflows.text_to_image(tiny_models, width=200, height=136)
    mode = "manual" if degrees else "auto"
    ours = latent_of(client, parallel(graph, devices=devices, mode=mode, **degrees))
    assert relative_error(ours, latent_of(client, graph)) <= TOLERANCE
    client.queue({"end": {"class_type": "ReleaseParallelPool", "inputs": {}}})


@pytest.mark.parametrize("loader", ["stock", "ours"])
def test_our_sampler_equals_ksampler(loader: str, client: ComfyClient, tiny_models: TinyModels) -> None:
    graph = workflows.text_to_image(tiny_models, steps=3, seed=21)
    ours = parallel(graph, sampler="ParallelFluxSampler")
    if loader == "stock":
        ours["model"] = graph["model"]
    stock_run, our_run = both(client, graph, ours)
    assert relative_error(saved_latent(client, our_run), saved_latent(client, stock_run)) <= TOLERANCE
    assert [each.value for each in our_run.progress] == [each.value for each in stock_run.progress]
    assert len(our_run.previews) == len(stock_run.previews) > 0


def test_the_comparison_sees_a_small_change_of_the_prompt(client: ComfyClient, tiny_models: TinyModels) -> None:
    stock = latent_of(client, workflows.text_to_image(tiny_models, steps=3))
    ours = latent_of(client, parallel(workflows.text_to_image(tiny_models, steps=3, prompt="a lighthouse at dawn")))
    assert relative_error(ours, stock) > 100 * TOLERANCE


def test_two_prompts_of_equal_shape_are_not_taken_for_each_other(client: ComfyClient, tiny_models: TinyModels) -> None:
    prompts = ["a castle in the rain", "a market in the sun"]
    graphs = [workflows.text_to_image(tiny_models, prompt=prompt) for prompt in prompts]
    stock = [latent_of(client, graph) for graph in graphs]
    for turn in range(4):
        ours = latent_of(client, parallel(workflows.text_to_image(tiny_models, prompt=prompts[turn % 2])))
        assert relative_error(ours, stock[turn % 2]) <= TOLERANCE
        assert relative_error(ours, stock[1 - turn % 2]) > 100 * TOLERANCE


@pytest.mark.parametrize("weight_dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.full)])
def test_a_smaller_compute_dtype_is_close_but_not_equal(
    weight_dtype: str, client: ComfyClient, tiny_models: TinyModels
) -> None:
    graph = workflows.text_to_image(tiny_models, guidance=4.0)  # which bf16 holds times a thousand
    exact = latent_of(client, graph)
    rounded = latent_of(client, parallel(graph, weight_dtype=weight_dtype))
    assert rounded.dtype == torch.float32
    assert TOLERANCE < relative_error(rounded, exact) < 0.1  # bf16 keeps 8 bits: about 1 % a call on these models
