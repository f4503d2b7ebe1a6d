"""What reaches into a model whose weights are elsewhere: refused, before any step runs, by the node to remove."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from host import workflows
from host.client import ComfyClient, Workflow
from host.pack_workflows import parallel, to_latent
from host.tiny_models import TinyModels


def between(graph: Workflow, class_type: str, **inputs: Any) -> Workflow:
    """`graph` with a node between our loader and the sampler."""
    graph["between"] = {"class_type": class_type, "inputs": {"model": ["model", 0], **inputs}}
    graph["sampler"]["inputs"]["model"] = ["between", 0]
    return graph


def merged(graph: Workflow) -> Workflow:
    """Our MODEL merged with itself."""
    inputs = {"model1": ["model", 0], "model2": ["model", 0], "ratio": 0.5}
    graph["between"] = {"class_type": "ModelMergeSimple", "inputs": inputs}
    graph["sampler"]["inputs"]["model"] = ["between", 0]
    return graph


def saved(graph: Workflow) -> Workflow:
    """Our MODEL written to a file."""
    graph["between"] = {"class_type": "ModelSave", "inputs": {"model": ["model", 0], "filename_prefix": "no"}}
    return {name: graph[name] for name in ("config", "model", "between")}


def with_hook(graph: Workflow, lora: str) -> Workflow:
    """A LoRA on one conditioning."""
    strengths = {"strength_model": 1.0, "strength_clip": 0.0}
    graph["hook"] = {"class_type": "CreateHookLora", "inputs": {"lora_name": lora, **strengths}}
    inputs = {"cond_NEW": ["guidance", 0], "strength": 1.0, "set_cond_area": "default", "hooks": ["hook", 0]}
    graph["hooked"] = {"class_type": "ConditioningSetProperties", "inputs": inputs}
    graph["sampler"]["inputs"]["positive"] = ["hooked", 0]
    return graph


# The graph, the class of the node that tells it, and the name its first line gives to remove.
REFUSED: dict[str, tuple[Callable[[Workflow, TinyModels], Workflow], str, str]] = {
    "merge": (lambda graph, tiny: merged(graph), "ModelMergeSimple", "ModelMergeSimple (node between)"),
    "save": (lambda graph, tiny: saved(graph), "ModelSave", "ModelSave (node between)"),
    "block patches": (lambda graph, tiny: between(graph, "FluxKVCache"), "FluxKVCache", "Flux KV Cache (node between)"),
    "compute dtype": (
        lambda graph, tiny: between(graph, "ModelComputeDtype", dtype="bf16"),
        "ModelComputeDtype",
        "(node between)",
    ),
    "hook lora": (lambda graph, tiny: with_hook(graph, tiny.lora_fused), "KSampler", "Create Hook LoRA"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_run_remotely_is_refused_by_name_before_a_step(
    kind: str, client: ComfyClient, tiny_models: TinyModels
) -> None:
    build, node, remove = REFUSED[kind]
    graph = build(to_latent(parallel(workflows.text_to_image(tiny_models))), tiny_models)
    result = client.queue(graph)
    assert (result.status, result.error_node, result.error_type) == ("error", node, "ValueError")
    first_line = result.error_message.splitlines()[0]
    assert remove in first_line
    assert "parallel MODEL" in first_line
    assert result.progress == [], "a step ran before the refusal"


@pytest.mark.parametrize("kind", REFUSED)
def test_stock_comfyui_takes_the_same_graphs(kind: str, client: ComfyClient, tiny_models: TinyModels) -> None:
    build, _, _ = REFUSED[kind]
    stock = to_latent(workflows.text_to_image(tiny_models))
    client.queue(build(stock | {"config": stock["clip"]}, tiny_models)).require_success()


def test_skipped_blocks_are_refused_at_the_first_call(client: ComfyClient, tiny_models: TinyModels) -> None:
    graph = to_latent(parallel(workflows.text_to_image(tiny_models)))
    graph = between(
        graph,
        "SkipLayerGuidanceDiT",
        double_layers="0",
        single_layers="0",
        scale=3.0,
        start_percent=0.0,
        end_percent=1.0,
        rescaling_scale=0.0,
    )
    result = client.queue(graph)
    assert (result.status, result.error_node) == ("error", "KSampler")
    assert "patches of its blocks (double_block 0, single_block 0)" in result.error_message.splitlines()[0]
