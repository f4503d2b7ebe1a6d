"""`make demo`: one image through several ranks inside a real ComfyUI, and the same image from stock ComfyUI.

Owns: the story a visitor sees, the table at its end, and the verdict (the exit status). Does not own: the server, the
client and the tiny models (tests/host), the workflow (api_workflows/flux_parallel.json), what is measured (nodes).
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from host.client import ComfyClient, Event, PromptResult, Workflow
from host.server import PACK_ROOT, ComfyServer, cuda_available
from host.tiny_models import TinyModels, write_tiny_models

from .table import image_error, print_table

WORKFLOW = PACK_ROOT / "api_workflows" / "flux_parallel.json"
STOCK = {"ParallelModelLoader": "UNETLoader", "ParallelSampler": "KSampler", "TimedVAEDecode": "VAEDecode"}
# Root mean square of the pixel differences over the standard deviation of the image. The CPU computes in fp32 and is
# exact to 1e-5, so only rounding to 8 bits shows (every pixel off by one level would be about 0.01); attention that
# does not communicate gives more than 0.2. GPUs compute in bf16 through other kernels, which the steps amplify.
TOLERANCE = {"cpu": 0.005, "cuda": 0.1}
FLAT_LEVELS = 2.0


@dataclass(frozen=True)
class Run:
    """One finished graph: what happened, and its image as (height, width, 3) in 0..255."""

    graph: Workflow
    result: PromptResult
    image: np.ndarray

    def node(self, class_type: str) -> str:
        """The id of the graph's node of a class."""
        return find(self.graph, class_type)

    def report(self, class_type: str) -> dict:
        """What a node of ours measured, as it reported it to the client."""
        return self.result.outputs[self.node(class_type)]["parallel_dit"][0]


def find(graph: Workflow, class_type: str) -> str:
    """The id of the one node of a class; raises ValueError when there is none or more."""
    ids = [node_id for node_id, node in graph.items() if node["class_type"] == class_type]
    if len(ids) != 1:
        raise ValueError(f"{len(ids)} nodes of class {class_type} in the workflow; the demo expects one")
    return ids[0]


def with_tiny_files(graph: Workflow, tiny: TinyModels) -> Workflow:
    """The shipped graph with the tiny files' names, and the loader that takes text encoders of any width."""
    graph = copy.deepcopy(graph)
    graph[find(graph, "ParallelModelLoader")]["inputs"]["unet_name"] = tiny.dev
    graph[find(graph, "VAELoader")]["inputs"]["vae_name"] = tiny.vae
    clip = graph[find(graph, "DualCLIPLoader")]
    clip["class_type"] = "TinyDualCLIPLoader"
    clip["inputs"] = {"clip_name1": tiny.clip_l, "clip_name2": tiny.t5, "type": "flux"}
    return graph


def without_our_nodes(graph: Workflow) -> Workflow:
    """The same graph through stock nodes alone."""
    graph = copy.deepcopy(graph)
    del graph[find(graph, "SPConfig")]
    del graph[find(graph, "ParallelModelLoader")]["inputs"]["sp_config"]
    for node in graph.values():
        node["class_type"] = STOCK.get(node["class_type"], node["class_type"])
    return graph


def show(text: str) -> None:
    """Prints a line at once, so that it is seen while the next thing runs."""
    print(text, flush=True)  # noqa: T201


def run(client: ComfyClient, graph: Workflow, label: str) -> Run:
    """Queues a graph, shows its progress, fetches its image. Raises RuntimeError when it failed or saved none."""

    def on_event(event: Event) -> None:
        if event.type == "executing" and event.data["node"]:
            show(f"  {event.t_s:6.1f} s  {graph[event.data['node']]['class_type']}")
        elif event.type == "progress":
            show(f"  {event.t_s:6.1f} s    step {event.data['value']} of {event.data['max']}")

    show(f"\n{label}")
    result = client.queue(graph, on_event=on_event, timeout_s=1200).require_success()
    if len(result.images()) != 1:
        raise RuntimeError(f"{label}: {len(result.images())} images were saved; the graph saves one")
    return Run(graph, result, np.asarray(client.image(result.images()[0]), dtype=np.float64))


def wrong(parallel: Run, stock: Run, limit: float) -> str:
    """What is wrong with the parallel image, "" when nothing is."""
    if parallel.image.shape != stock.image.shape:
        return f"the image is {parallel.image.shape}, stock ComfyUI's {stock.image.shape}"
    if parallel.image.std() < FLAT_LEVELS:
        return f"the image is flat (standard deviation {parallel.image.std():.2f} of 255), so it proves nothing"
    error = image_error(parallel.image, stock.image)
    if not error <= limit:  # not a number is wrong as well
        return f"the image's relative error against stock ComfyUI's is {error:.3g}; at most {limit:g} is allowed"
    return ""


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="One image over several ranks in a real ComfyUI.")
    parser.add_argument("--devices", help="as the SP Config node takes them (default: all GPUs, else cpu:2)")
    parser.add_argument("--size", type=int, help="pixels on a side (default: the workflow's)")
    parser.add_argument("--steps", type=int, help="denoise steps (default: the workflow's)")
    parser.add_argument("--output", type=Path, default=PACK_ROOT / "demo_output", help="where images and the log go")
    return parser.parse_args()


def shipped_graph(arguments: argparse.Namespace, tiny: TinyModels) -> Workflow:
    """The shipped workflow over the tiny files, on the devices and at the size asked for."""
    graph = with_tiny_files(json.loads(WORKFLOW.read_text(encoding="utf-8")), tiny)
    devices = arguments.devices or ("all" if cuda_available() else "cpu:2")
    graph[find(graph, "SPConfig")]["inputs"]["devices"] = devices
    if arguments.size:
        graph[find(graph, "EmptySD3LatentImage")]["inputs"] |= {"width": arguments.size, "height": arguments.size}
    if arguments.steps:
        graph[find(graph, "ParallelSampler")]["inputs"]["steps"] = arguments.steps
    return graph


def main(arguments: argparse.Namespace) -> int:
    """Runs both graphs and returns 0 when the parallel image is there and right."""
    arguments.output.mkdir(parents=True, exist_ok=True)
    busy = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="parallel-dit-demo-") as base:
        show("writing tiny random-weight models")
        tiny = write_tiny_models(Path(base))
        graph = shipped_graph(arguments, tiny)
        with ComfyServer(Path(base)) as server:
            show(f"ComfyUI with the pack answers on {server.url}")
            try:
                client = ComfyClient(server.url)
                devices = graph[find(graph, "SPConfig")]["inputs"]["devices"]
                parallel = run(client, graph, f"{WORKFLOW.name} on devices {devices!r}")
                stock = run(client, without_our_nodes(graph), "the same graph through stock ComfyUI")
            finally:
                (arguments.output / "server.log").write_text(server.log, encoding="utf-8")
    saved = arguments.output / "flux_parallel.png"
    Image.fromarray(parallel.image.astype(np.uint8)).save(saved)
    Image.fromarray(stock.image.astype(np.uint8)).save(arguments.output / "flux_stock.png")
    show("")
    print_table(parallel, stock)
    show(f"\n{os.cpu_count()} CPU cores; load average before the start {busy:.1f} (times are fair only when it is low)")
    show(f"image: {saved}")
    problem = wrong(parallel, stock, TOLERANCE["cuda" if cuda_available() else "cpu"])
    if problem:
        print(f"WRONG: {problem}", file=sys.stderr)  # noqa: T201
    return 1 if problem else 0


if __name__ == "__main__":
    raise SystemExit(main(parse_arguments()))
