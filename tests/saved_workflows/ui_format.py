"""From the format ComfyUI's editor saves to the one its server queues, as the editor itself converts it.

Owns: nodes, links and the order of widget values (the part of a saved workflow that an added or moved input breaks).
Does not own: subgraphs, reroutes, muted and bypassed nodes, which the shipped examples do not use; they raise.
"""

from __future__ import annotations

from typing import Any

from host.client import Workflow

WIDGETS = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")
ACTIVE = 0


def to_api(saved: dict[str, Any], object_info: dict[str, Any]) -> Workflow:
    """The graph the editor would queue, node ids as text. Raises ValueError when the file holds what is not owned."""
    sources = {link: (str(node), slot) for link, node, slot, *_ in saved["links"]}
    graph: Workflow = {}
    for node in saved["nodes"]:
        if node["mode"] != ACTIVE or node["type"] not in object_info:
            raise ValueError(f"node {node['id']} ({node['type']}) is muted, bypassed or unknown")
        values = widget_values(node, object_info[node["type"]])
        linked = {each["name"]: list(sources[each["link"]]) for each in node["inputs"] if each["link"] is not None}
        title = {"title": node.get("title", node["type"])}
        graph[str(node["id"])] = {"class_type": node["type"], "inputs": values | linked, "_meta": title}
    return graph


def widget_values(node: dict[str, Any], info: dict[str, Any]) -> dict[str, Any]:
    """The node's values by input name. The file has them by place alone, so the order of inputs decides."""
    left = list(node.get("widgets_values", []))
    values = {}
    for group in ("required", "optional"):
        for name in info["input_order"].get(group, ()):
            kind, *rest = info["input"][group][name]
            options = rest[0] if rest else {}
            if (isinstance(kind, str) and kind not in WIDGETS) or options.get("forceInput"):
                continue
            if not left:
                break  # an input added later: the editor takes its default
            values[name] = left.pop(0)
            if options.get("control_after_generate"):
                left.pop(0)  # what the editor does with the seed afterwards
    if left:
        raise ValueError(f"node {node['id']} ({node['type']}) has {len(left)} values for no input: {left}")
    return values
