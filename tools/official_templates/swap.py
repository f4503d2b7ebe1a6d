"""What becomes of a template: small enough for a test machine, then with the pack's loader, then without exchange.

Owns: graphs in API form, in and out; nothing is run. `small` keeps what the samplers need, with stand-ins for what
loads files or makes an input (stand_ins.py); every other node, each link and each value is the template's own but
sizes, lengths and steps. `ours` swaps the loader alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from families.graphs import node as node_of
from host.client import Workflow

from .graph import CHECKPOINTS, DIFFUSION_MODEL, SAMPLERS, Info, Link, NotTriedError, links, needed
from .models import Tiny
from .stand_ins import Making


@dataclass
class Small:
    """A template made small: its graph, the files that it needs, and the names of its weights' types."""

    graph: Workflow
    files: list[tuple[str, Tiny]] = field(default_factory=list)

    @property
    def shares_tokens(self) -> bool:
        """Whether ranks share the tokens of each of its models."""
        return all(tiny.shares_tokens for _, tiny in self.files)

    @property
    def models(self) -> list[str]:
        """The tiny files that stand for its models."""
        return sorted({tiny.short for _, tiny in self.files})


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
    return Small(graph, made.files)


def ours(made: Small, plan: Mapping[str, Any]) -> Workflow:
    """The same graph with Parallel Model Loader for Load Diffusion Model, and Parallelize Model behind checkpoints."""
    return _swapped(made, plan, lambda graph, name: [name, 0])


def without_exchange(made: Small, plan: Mapping[str, Any], *, rows: bool) -> Workflow:
    """The same whose ranks exchange nothing: what has to differ. `rows`: ranks that share a batch's rows."""

    def switched_off(graph: Workflow, name: str) -> Link:
        graph[f"control {name}"] = node_of("SwitchOffExchange", model=[name, 0], rows=rows)
        return [f"control {name}", 0]

    return _swapped(made, plan, switched_off)


def _swapped(made: Small, plan: Mapping[str, Any], then: Callable[[Workflow, str], Link]) -> Workflow:
    graph = copy.deepcopy(made.graph)
    graph["config"] = node_of("SPConfig", **plan)
    for name, node in list(graph.items()):
        if node["class_type"] == DIFFUSION_MODEL:
            node["class_type"] = "ParallelModelLoader"
            node["inputs"] |= {"sp_config": ["config", 0]}
            users, swapped = _users(graph, [name, 0]), name
        elif node["class_type"] in CHECKPOINTS:
            users, swapped = _users(graph, [name, 0]), f"parallel {name}"
            if users:
                graph[swapped] = node_of("ParallelizeModel", model=[name, 0], sp_config=["config", 0])
        else:
            continue
        link = then(graph, swapped) if users else None
        for inputs, key in users:
            inputs[key] = link
    return graph


def _users(graph: Workflow, link: Link) -> list[tuple[dict[str, Any], str]]:
    return [(node["inputs"], key) for node in graph.values() for key, value in links(node) if value == link]
