"""The pack's nodes put into stock workflows, and the latents of both to hold against each other."""

import copy
from typing import Any

import torch
from safetensors.torch import load

from parallel_runtime.proof import relative_error as relative_error  # for those who compare latents

from .client import ComfyClient, PromptResult, Workflow
from .workflows import node

LOADER = "ParallelFluxLoader"
TOLERANCE = 1e-5  # fp32: the largest relative error the design allows, for any plan


def parallel(
    graph: Workflow,
    *,
    devices: str = "cpu:2",
    mode: str = "auto",
    ulysses: int = 1,
    ring: int = 1,
    weight_dtype: str = "default",
    sampler: str = "KSampler",
    loader: str = LOADER,
    **optional: Any,
) -> Workflow:
    """The same graph with `loader` of ours in place of UNETLoader, and `sampler` in place of KSampler.

    `optional` are inputs of SP Config that a saved workflow may lack: lora, data, cfg, weights.
    """
    graph = copy.deepcopy(graph)
    inputs = {"mode": mode, "devices": devices, "ulysses": ulysses, "ring": ring, **optional}
    graph["config"] = node("SPConfig", **inputs)
    graph["model"] = node(
        loader, unet_name=graph["model"]["inputs"]["unet_name"], weight_dtype=weight_dtype, sp_config=["config", 0]
    )
    graph["sampler"]["class_type"] = sampler
    return graph


def parallelized(graph: Workflow, *, source: str = "model", **config: Any) -> Workflow:
    """The same graph with Parallelize Model behind the node `source`; whoever used that uses it."""
    graph = copy.deepcopy(graph)
    for user in graph.values():
        links = {key: ["parallel", 0] for key, value in user["inputs"].items() if value == [source, 0]}
        user["inputs"] |= links
    graph["config"] = node("SPConfig", **{"mode": "auto", "devices": "cpu:2", "ulysses": 1, "ring": 1} | config)
    graph["parallel"] = node("ParallelizeModel", model=[source, 0], sp_config=["config", 0])
    return graph


def to_latent(graph: Workflow) -> Workflow:
    """The same graph, saving the sampler's latent in place of an image."""
    graph = {name: each for name, each in copy.deepcopy(graph).items() if name not in ("decode", "save")}
    inputs = {"samples": ["sampler", 0], "filename_prefix": "latent"}
    return graph | {"save": node("SaveLatent", **inputs)}


def saved_latent(client: ComfyClient, result: PromptResult, *, node: str = "save") -> torch.Tensor:
    """The latent that a SaveLatent saved, by default the one that `to_latent` puts into a graph."""
    (item,) = result.require_success().outputs[node]["latents"]
    return load(client.get_bytes("/view", **{key: item[key] for key in ("filename", "subfolder", "type")}))[
        "latent_tensor"
    ]


def latent_of(client: ComfyClient, graph: Workflow) -> torch.Tensor:
    """Runs a graph that must succeed, up to its sampler, and returns the latent."""
    return saved_latent(client, client.queue(to_latent(graph)))
