"""Subgraph blueprints: a template's graph as one node, which people drop into workflows of their own.

ComfyUI lists `subgraphs/*.json` of each pack and the editor offers them among the nodes. Owns: which templates have
one, which inputs it shows, the form of its file. Does not own: the nodes inside (drawn_workflows.py), addresses
(templates.py).
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass, field
from typing import Any

from host.client import Workflow
from saved_workflows.ui_format import NOTE

from .templates import FOLDERS, TEMPLATES, Template

# Templates with a blueprint: Flux.1, and a graph of each family that people run most.
BLUEPRINTS = {
    "flux_parallel": "Parallel Text to Image (Flux.1)",
    "flux2_klein": "Parallel Text to Image (Flux.2 klein)",
    "krea2_turbo": "Parallel Text to Image (Krea 2 Turbo)",
    "ltx2_t2v": "Parallel Text to Video (LTX-2)",
    "minimax_h3_t2v": "Parallel Text to Video (MiniMax H3)",
    "qwen_image": "Parallel Text to Image (Qwen-Image)",
    "sdxl": "Parallel Text to Image (SDXL)",
    "wan22_t2v": "Parallel Text to Video (Wan 2.2)",
    "wan_t2v": "Parallel Text to Video (Wan 2.1)",
    "z_image_turbo": "Parallel Text to Image (Z-Image Turbo)",
}
CATEGORY = "Parallel DiT"
# Inputs that the node shows, in this order; those of one name and one value are one.
SHOWN = ("text", "prompt", "width", "height", "length", "value", "seed", "noise_seed", "steps", "devices", *FOLDERS)
BY_TITLE = ("text", "value")  # whose own name says nothing
INPUT, OUTPUT = -10, -20  # the numbers of the nodes that stand for the outside
NAMESPACE = uuid.UUID("8f0c4f0e-6f0f-4a53-9d4b-0d6a7f0d2c11")


@dataclass
class Shown:
    """One input of the node: who takes it inside, as (node, place)."""

    name: str
    kind: str
    value: Any
    targets: list[tuple[dict[str, Any], int]] = field(default_factory=list)


def without_save(graph: Workflow) -> Workflow:
    """The graph inside: all but what saves, which is left to the workflow outside."""
    return {name: node for name, node in graph.items() if not node["class_type"].startswith("Save")}


def as_blueprint(name: str, graph: Workflow, drawn: dict[str, Any]) -> dict[str, Any]:
    """The file of a template's blueprint; `drawn` is `without_save(graph)` as the editor saves it.

    No two blueprints have a node of one number, since the editor keeps the values of a dropped one by them.
    """
    first = 100 * (1 + list(BLUEPRINTS).index(name))
    nodes = [node | {"id": first + node["id"]} for node in drawn["nodes"] if node["type"] != NOTE]
    names = ("id", "origin_id", "origin_slot", "target_id", "target_slot", "type")
    links = [dict(zip(names, link, strict=True)) for link in drawn["links"]]
    for link in links:
        link |= {"origin_id": first + link["origin_id"], "target_id": first + link["target_id"]}
    sockets_first(nodes, links)
    shown = _shown(nodes, {node["title"]: graph_node for node, graph_node in zip(nodes, _inside(graph), strict=True)})
    inputs = [_input(name, place, each, links) for place, each in enumerate(shown)]
    outputs = [_output(name, place, *each, links) for place, each in enumerate(_results(graph, nodes))]
    identity = str(uuid.uuid5(NAMESPACE, name))
    right = max(node["pos"][0] + node["size"][0] for node in nodes)
    definition = {
        **{"id": identity, "version": 1, "revision": 0, "config": {}, "name": BLUEPRINTS[name]},
        "state": {"lastGroupId": 0, "lastNodeId": first + len(nodes) + 1, "lastLinkId": len(links), "lastRerouteId": 0},
        "inputNode": {"id": INPUT, "bounding": [-200, 60, 120, 40 + 20 * len(inputs)]},
        "outputNode": {"id": OUTPUT, "bounding": [right + 60, 60, 120, 40 + 20 * len(outputs)]},
        **{"inputs": inputs, "outputs": outputs, "widgets": [], "nodes": nodes, "groups": [], "links": links},
        **{"extra": {}, "category": CATEGORY, "description": _words(TEMPLATES[name])},
    }
    number = first + len(nodes) + 1
    node = {
        **{"id": number, "type": identity, "pos": [40, 60], "size": [400, 80 + 26 * len(inputs)], "flags": {}},
        **{"order": 0, "mode": 0, "title": BLUEPRINTS[name], "widgets_values": []},
        "inputs": [
            {"name": each.name, "type": each.kind, "widget": {"name": each.name}, "link": None} for each in shown
        ],
        "outputs": [{"name": each["name"], "type": each["type"], "links": []} for each in outputs],
        "properties": {
            "proxyWidgets": [[str(to["id"]), to["inputs"][at]["name"]] for each in shown for to, at in each.targets[:1]]
        },
    }
    return {
        **{"revision": 0, "last_node_id": number, "last_link_id": 0, "nodes": [node], "links": [], "version": 0.4},
        "definitions": {"subgraphs": [definition]},
    }


def sockets_first(nodes: list[dict[str, Any]], links: list[dict[str, Any]]) -> None:
    """Inputs in the order in which the editor saves them, widgets last: the one of ComfyUI 0.24 takes the places that
    links name to be in that order when it drops a blueprint."""
    for node in nodes:
        before = node["inputs"]
        node["inputs"] = sorted(before, key=lambda each: "widget" in each)
        for link in links:
            if link["target_id"] == node["id"]:
                link["target_slot"] = node["inputs"].index(before[link["target_slot"]])


def inside(blueprint: dict[str, Any]) -> dict[str, Any]:
    """What a blueprint holds, as a file of the editor without subgraphs: its inputs have the values given inside."""
    (definition,) = blueprint["definitions"]["subgraphs"]
    outer = {link["id"] for link in definition["links"] if link["origin_id"] == INPUT}
    nodes = [
        node | {"inputs": [each | {"link": None} if each["link"] in outer else each for each in node["inputs"]]}
        for node in definition["nodes"]
    ]
    ends = ("id", "origin_id", "origin_slot", "target_id", "target_slot", "type")
    inner = [each for each in definition["links"] if INPUT != each["origin_id"] and each["target_id"] != OUTPUT]
    return {"nodes": nodes, "links": [[link[end] for end in ends] for link in inner]}


def _words(template: Template) -> str:
    """What the editor shows beside the node's name, in a line."""
    return f"{template.family}, {template.makes}, over several devices: all, a number of them, or cuda:0,cuda:1."


def _inside(graph: Workflow) -> list[dict[str, Any]]:
    return list(without_save(graph).values())


def _shown(nodes: list[dict[str, Any]], given: dict[str, dict[str, Any]]) -> list[Shown]:
    """The inputs that are shown; two of one name with other values are told apart by their nodes' titles."""
    found: list[Shown] = []
    for wanted in SHOWN:
        for node in nodes:
            values = given[node["title"]]["inputs"]
            if isinstance(values.get(wanted), list) or wanted not in values:
                continue
            at = next(place for place, each in enumerate(node["inputs"]) if each["name"] == wanted)
            name, value = wanted, values[wanted]
            if wanted in BY_TITLE or any(each.name == wanted and each.value != value for each in found):
                name = re.sub(r"\W+", "_", node["title"].lower())
            same = next((each for each in found if each.name == name), None)
            if same is None:
                same = Shown(name, node["inputs"][at]["type"], value)
                found.append(same)
            same.targets.append((node, at))
    return found


def _input(template: str, place: int, shown: Shown, links: list[dict[str, Any]]) -> dict[str, Any]:
    """An input of the subgraph, with its links to the nodes inside."""
    numbers = []
    for node, at in shown.targets:
        numbers.append(number := len(links) + 1)
        node["inputs"][at]["link"] = number
        ends = {"origin_id": INPUT, "origin_slot": place, "target_id": node["id"], "target_slot": at}
        links.append({"id": number, **ends, "type": shown.kind})
    identity = str(uuid.uuid5(NAMESPACE, f"{template} input {shown.name}"))
    return {
        **{"id": identity, "name": shown.name, "type": shown.kind, "linkIds": numbers},
        **{"label": shown.name.replace("_", " "), "pos": [-100, 80 + 20 * place]},
    }


def _results(graph: Workflow, nodes: list[dict[str, Any]]) -> list[tuple[dict[str, Any], int, str]]:
    """What the node gives: what the template saves, and the sampler's report where there is one."""
    titles = {name: node["_meta"]["title"] for name, node in graph.items()}
    by_title = {node["title"]: node for node in nodes}
    saves = [node for node in graph.values() if node["class_type"].startswith("Save")]
    found = [value for node in saves for value in node["inputs"].values() if isinstance(value, list)]
    results = [(by_title[titles[source]], slot, "") for source, slot in found]
    timed = [(node, 1, "timing") for node in nodes if node["type"] == "ParallelSampler"]
    return results + timed


def _output(
    template: str, place: int, node: dict[str, Any], slot: int, name: str, links: list[dict[str, Any]]
) -> dict[str, Any]:
    """An output of the subgraph, with its link from the node inside."""
    kind, number = node["outputs"][slot]["type"], len(links) + 1
    ends = {"origin_id": node["id"], "origin_slot": slot, "target_id": OUTPUT, "target_slot": place}
    links.append({"id": number, **ends, "type": kind})
    node["outputs"][slot]["links"] = [*(node["outputs"][slot]["links"] or []), number]
    name = name or kind.lower()
    identity = str(uuid.uuid5(NAMESPACE, f"{template} output {name}"))
    return {"id": identity, "name": name, "type": kind, "linkIds": [number], "pos": [0, 80 + 20 * place]}
