"""What becomes of a template: small enough for a test machine, then with the pack's loader, then without exchange.

Owns: graphs in API form, in and out; nothing is run. `small` keeps what the samplers need, with stand-ins for what
loads files or makes an input (stand_ins.py); every other node, each link and each value is the template's own but
sizes, lengths and steps. `ours` swaps the loader alone.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from families.graphs import node as node_of
from host.client import Workflow

from .graph import CHECKPOINTS, DIFFUSION_MODEL, SAMPLERS, Info, Link, NotTriedError, links, needed
from .models import Tiny
from .stand_ins import Making

Plans = Mapping[bool, Mapping[str, Any]]


@dataclass
class Small:
    """A template made small: its graph, the files that it needs by folder, and the tiny model of each loader."""

    graph: Workflow
    files: list[tuple[str, Tiny]] = field(default_factory=list)
    loaders: dict[str, Tiny] = field(default_factory=dict)

    @property
    def models(self) -> list[str]:
        """The tiny files that stand for its models."""
        return sorted({tiny.short for tiny in self.loaders.values()})

    @property
    def ways(self) -> set[bool]:
        """Of its models, whether ranks share the tokens (True) or the rows of a batch."""
        return {tiny.shares_tokens for tiny in self.loaders.values()}


def small(graph: Workflow, info: Info) -> Small:
    """The template's graph up to its samplers, whose every latent is kept. Raises NotTriedError where it cannot be."""
    samplers = [name for name, node in graph.items() if node["class_type"] in SAMPLERS]
    if not samplers:
        raise NotTriedError("no stock sampler node is active in it")
    made = Making(needed(graph, samplers), info)
    made.make_up()
    made.graph = needed(made.graph, samplers)
    made.replace_loaded()
    graph = made.graph = needed(made.graph, samplers)
    if not any(node["class_type"] in (DIFFUSION_MODEL, *CHECKPOINTS) for node in graph.values()):
        raise NotTriedError("no loader of a model is active in it")
    made.load_tiny_files()
    made.make_small()
    for name in samplers:
        outputs = info[graph[name]["class_type"]]["output"]
        for slot, kind in enumerate(outputs):
            if kind == "LATENT":
                graph[f"keep {name} {slot}"] = node_of("KeepLatent", samples=[name, slot], name=f"{name} {slot}")
    return Small(graph, made.files, made.loaders)


def ours(made: Small, plans: Plans) -> Workflow:
    """The same graph with Parallel Model Loader for Load Diffusion Model, and Parallelize Model behind checkpoints.

    `plans`: SP Config's inputs for models whose tokens ranks share (True), and for others.
    """
    return _swapped(made, plans, None)


def without_exchange(made: Small, plans: Plans) -> Workflow:
    """The same whose ranks exchange nothing, or all compute the first row of a batch: what has to differ."""
    return _swapped(made, plans, "SwitchOffExchange")


def stock_otherwise(made: Small, way: Mapping[str, Any]) -> Workflow:
    """Stock's graph whose models compute as exactly in another way (StockAttention's inputs): what rounding moves."""
    graph = copy.deepcopy(made.graph)
    for name in made.loaders:
        users = _users(graph, [name, 0])
        graph[f"kernel {name}"] = node_of("StockAttention", model=[name, 0], **way)
        for inputs, key in users:
            inputs[key] = [f"kernel {name}", 0]
    return graph


def _swapped(made: Small, plans: Plans, control: str | None) -> Workflow:
    graph = copy.deepcopy(made.graph)
    for shares in made.ways:
        graph[f"config {shares}"] = node_of("SPConfig", **plans[shares])
    for name, tiny in made.loaders.items():
        users, config, end = _users(graph, [name, 0]), [f"config {tiny.shares_tokens}", 0], name
        if graph[name]["class_type"] == DIFFUSION_MODEL:
            graph[name]["class_type"] = "ParallelModelLoader"
            graph[name]["inputs"] |= {"sp_config": config}
        else:
            end = f"parallel {name}"
            graph[end] = node_of("ParallelizeModel", model=[name, 0], sp_config=config)
        if control:
            graph[f"control {name}"] = node_of(control, model=[end, 0], rows=not tiny.shares_tokens)
            end = f"control {name}"
        for inputs, key in users:
            inputs[key] = [end, 0]
    return graph


def _users(graph: Workflow, link: Link) -> list[tuple[dict[str, Any], str]]:
    return [(node["inputs"], key) for node in graph.values() for key, value in links(node) if value == link]
