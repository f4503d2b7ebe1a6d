"""Ours against stock ComfyUI on the same graph in one server: a step of the sampler as a client sees it.

Owns the graphs and the rounds. Does not own the server, the client and the tiny models (tests/host). Stock runs with
torch's attention and as many threads as there are cores; so does one rank; two ranks have half of them each.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median

from host import workflows
from host.client import ComfyClient, Workflow
from host.pack_workflows import parallel
from host.server import ComfyServer
from host.tiny_models import TinyModels, write_tiny_models

ROUNDS, STEPS = 5, 5
STOCK = "stock ComfyUI"
CANDIDATES = {
    "one rank, KSampler": {"devices": "cpu:1"},
    "ulysses 2, KSampler": {"ulysses": 2},
    "ulysses 2, KSampler, its loop in ComfyUI": {"ulysses": 2, "loop": "host"},
}


def measure() -> dict[str, list[float]]:
    """Seconds of a step by candidate, one value a round; the first round warms up and is left out."""
    with tempfile.TemporaryDirectory(prefix="stock-") as base:
        tiny = write_tiny_models(Path(base), hidden=512, depth=2, single=4)
        graphs = all_graphs(tiny)
        seconds: dict[str, list[float]] = {name: [] for name in graphs}
        with ComfyServer(Path(base)) as server:
            client = ComfyClient(server.url)
            for number in range(ROUNDS + 1):
                for name, graph in graphs.items():
                    value = step_seconds(client, graph, seed=number)
                    seconds[name] += [value] if number else []
    return seconds


def all_graphs(tiny: TinyModels) -> dict[str, Workflow]:
    """Text to image, 2,048 image tokens, by candidate."""
    stock = workflows.text_to_image(tiny, width=1024, height=512, steps=STEPS)
    return {STOCK: stock} | {name: parallel(stock, mode="manual", **given) for name, given in CANDIDATES.items()}


def step_seconds(client: ComfyClient, graph: Workflow, *, seed: int) -> float:
    """From the first step's end to the last one's, by step: loading and the first step stay out."""
    graph = graph | {"sampler": graph["sampler"] | {"inputs": graph["sampler"]["inputs"] | {"seed": seed}}}
    result = client.queue(graph, timeout_s=600).require_success()
    times = [event.t_s for event in result.progress if event.node == "sampler" and event.value > 0]
    return (times[-1] - times[0]) / (len(times) - 1)


def rows() -> list[tuple[str, str, str]]:
    """Figure, target, measured. Ratios are medians of each round's own ratio."""
    seconds = measure()
    targets = dict.fromkeys(CANDIDATES, "at most 1.00x")
    targets["one rank, KSampler"] = "at most 1.02x"
    found = []
    for name, values in seconds.items():
        ratio = median(ours / stock for ours, stock in zip(values, seconds[STOCK], strict=True))
        spread = f"{1000 * median(values):.0f} ms, {1000 * min(values):.0f} to {1000 * max(values):.0f}"
        found.append((f"a step: {name}", targets.get(name, ""), f"{ratio:.2f}x ({spread})"))
    return found
