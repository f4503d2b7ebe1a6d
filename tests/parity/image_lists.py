"""Stock graphs of single images as one graph, and as lists of the pack's list sampler; the latents of both."""

from typing import Any

import torch
from safetensors.torch import load

from host.client import ComfyClient, PromptResult, Workflow
from host.pack_workflows import relative_error

from .runner import parallelized

DATA_2 = {"devices": "cpu:2", "data": 2}
LISTED = ("positive", "negative", "latent_image", "seed")
SHARED = ("model", "clip", "vae")


def merged(graphs: list[Workflow]) -> Workflow:
    """All graphs as one, which shares what does not depend on the image; nodes of graph k are named `k name`."""
    together: Workflow = {}
    for number, graph in enumerate(graphs):
        names = {name: name if name in SHARED else f"{number} {name}" for name in graph}
        for name, node in graph.items():
            inputs = {
                key: [names[value[0]], value[1]] if isinstance(value, list) else value
                for key, value in node["inputs"].items()
            }
            together[names[name]] = {"class_type": node["class_type"], "inputs": inputs}
    return together


def listed(graphs: list[Workflow], **plan: Any) -> Workflow:
    """The same images by our list sampler, with the model of the first graph."""
    together = merged(graphs)
    samplers = [together.pop(f"{number} sampler")["inputs"] for number in range(len(graphs))]
    inputs = dict(samplers[0])
    for slot in LISTED:
        items = {f"item_{number}": given[slot] for number, given in enumerate(samplers)}
        together[f"all {slot}"] = {"class_type": "MakeList", "inputs": items}
        inputs[slot] = [f"all {slot}", 0]
    together = {name: node for name, node in together.items() if not name.endswith(" save")}
    together["sampler"] = {"class_type": "ParallelFluxListSampler", "inputs": inputs}
    links = {"samples": ["sampler", 0], "filename_prefix": "listed"}
    together["save"] = {"class_type": "SaveLatent", "inputs": links}
    return parallelized(together, **plan) if plan else together


def latents(client: ComfyClient, result: PromptResult, nodes: list[str]) -> list[torch.Tensor]:
    items = [item for node in nodes for item in result.require_success().outputs[node]["latents"]]
    return [
        load(client.get_bytes("/view", **{key: item[key] for key in ("filename", "subfolder", "type")}))[
            "latent_tensor"
        ]
        for item in items
    ]


def singles(client: ComfyClient, graphs: list[Workflow]) -> list[torch.Tensor]:
    """What stock ComfyUI makes of each graph."""
    result = client.queue(merged(graphs))
    return latents(client, result, [f"{number} save" for number in range(len(graphs))])


def differences(ours: list[torch.Tensor], stock: list[torch.Tensor]) -> list[float]:
    return [relative_error(one, other) for one, other in zip(ours, stock, strict=True)]
