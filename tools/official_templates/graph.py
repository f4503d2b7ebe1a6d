"""Graphs in API form: what is linked to what, and what a node needs.

Owns: the names of stock's samplers and loaders. Nothing here changes a graph.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from host.client import Workflow

Info = Mapping[str, Mapping[str, Any]]
Link = list[Any]
SAMPLERS = ("KSampler", "KSamplerAdvanced", "SamplerCustom", "SamplerCustomAdvanced")
DIFFUSION_MODEL = "UNETLoader"
CHECKPOINTS = ("CheckpointLoaderSimple", "ImageOnlyCheckpointLoader")


class NotTriedError(ValueError):
    """There is nothing to compare; the text says why, for the table."""


def links(node: Mapping[str, Any]) -> Iterator[tuple[str, Link]]:
    """The inputs of a node that other nodes give."""
    for name, value in node["inputs"].items():
        if isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], int):
            yield name, value


def needed(graph: Workflow, ends: Sequence[str]) -> Workflow:
    """The nodes that these and what they need are. Raises NotTriedError for a link to a node that is not there."""
    kept: Workflow = {}
    waiting = list(ends)
    while waiting:
        name = waiting.pop()
        if name in kept:
            continue
        if name not in graph:
            raise NotTriedError(f"node {name}, which another one is linked to, is not in the graph")
        kept[name] = copy.deepcopy(graph[name])
        waiting += [source for _, (source, _) in links(graph[name])]
    return kept
