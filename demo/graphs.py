"""The demo's graphs: the shipped workflow over the demo's files, and the same through stock nodes, or without exchange.

Owns: what is changed in a graph. Does not own: running it (run.py).
"""

from __future__ import annotations

import copy
import json
from pathlib import Path

from host.client import Workflow
from host.server import PACK_ROOT, ComfyServer, link
from parallel_runtime.devices import parse_devices

from .pictures import SIZE

WORKFLOW = PACK_ROOT / "api_workflows" / "flux_parallel.json"
MODELS = Path(__file__).parent / "models"
TEXT_ENCODER = Path(__file__).parent / "text_encoder_node"
TRANSFORMER, AUTOENCODER = "demo_transformer.safetensors", "demo_autoencoder.safetensors"
FOLDERS = {TRANSFORMER: "diffusion_models", AUTOENCODER: "vae"}
STOCK = {"ParallelModelLoader": "UNETLoader", "ParallelSampler": "KSampler", "TimedVAEDecode": "VAEDecode"}
HEADS = 2  # of the demo's transformer: the most that ulysses can share


def add_demo_model(models: Path) -> None:
    """Link the demo's files into a folder of ComfyUI's models."""
    for name, folder in FOLDERS.items():
        (models / folder).mkdir(parents=True, exist_ok=True)
        link(models / folder / name, MODELS / name)


def demo_server(base: Path) -> ComfyServer:
    """A ComfyUI in the folder `base` with the pack, the demo's model and its text encoder."""
    add_demo_model(base / "models")
    return ComfyServer(base, packs=(TEXT_ENCODER,))


def find(graph: Workflow, class_type: str) -> str:
    """The id of the one node of a class; raises ValueError when there is none or more."""
    ids = [node_id for node_id, node in graph.items() if node["class_type"] == class_type]
    if len(ids) != 1:
        raise ValueError(f"{len(ids)} nodes of class {class_type} in the workflow; the demo expects one")
    return ids[0]


def parallel_graph(prompt: str, *, devices: str, steps: int = 20, seed: int = 7) -> Workflow:
    """The shipped workflow with the demo's files, over all of `devices` whatever the planner would choose."""
    graph = with_demo_files(json.loads(WORKFLOW.read_text(encoding="utf-8")), prompt)
    graph[find(graph, "ParallelSampler")]["inputs"] |= {"steps": steps, "seed": seed}
    ulysses, ring = degrees(devices)
    graph[find(graph, "SPConfig")]["inputs"] |= {
        "mode": "manual", "devices": devices, "ulysses": ulysses, "ring": ring
    }  # fmt: skip
    return graph


def with_demo_files(graph: Workflow, prompt: str) -> Workflow:
    """A workflow of Flux.1 with the demo's model, text encoder and size. Raises ValueError for one of other nodes."""
    graph = copy.deepcopy(graph)
    graph[find(graph, "ParallelModelLoader")]["inputs"]["unet_name"] = TRANSFORMER
    graph[find(graph, "VAELoader")]["inputs"]["vae_name"] = AUTOENCODER
    clip = graph[find(graph, "DualCLIPLoader")]
    clip["class_type"], clip["inputs"] = "DemoTextEncoderLoader", {}
    graph[find(graph, "CLIPTextEncode")]["inputs"]["text"] = prompt
    graph[find(graph, "EmptySD3LatentImage")]["inputs"] |= {"width": SIZE, "height": SIZE}
    return graph


def degrees(devices: str) -> tuple[int, int]:
    """Ulysses and ring degrees that use all devices. Raises ValueError for devices that are not there."""
    count = len(parse_devices(devices).devices)
    ulysses = HEADS if count % HEADS == 0 else 1
    return ulysses, count // ulysses


def without_our_nodes(graph: Workflow) -> Workflow:
    """The same graph through stock nodes alone."""
    graph = copy.deepcopy(graph)
    del graph[find(graph, "SPConfig")]
    del graph[find(graph, "ParallelModelLoader")]["inputs"]["sp_config"]
    for node in graph.values():
        node["class_type"] = STOCK.get(node["class_type"], node["class_type"])
    return graph


def without_exchange(graph: Workflow) -> Workflow:
    """The same graph, each rank attending to its own tokens alone."""
    graph = copy.deepcopy(graph)
    sampler = graph[find(graph, "ParallelSampler")]["inputs"]
    graph["off"] = {"class_type": "SwitchOffExchange", "inputs": {"model": sampler["model"]}}
    sampler["model"] = ["off", 0]
    return graph
