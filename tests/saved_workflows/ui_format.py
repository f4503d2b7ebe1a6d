"""From the format ComfyUI's editor saves to the one its server queues, as the editor itself converts it.

No shipped template uses subgraphs, reroutes, muted or bypassed nodes; they raise.
"""

from collections.abc import Iterator
from typing import Any

from host.client import Workflow
from host.outcomes import OURS, StockFailsError

CHOICE = "COMFY_DYNAMICCOMBO_V3"  # a COMBO whose options may bring inputs of their own
WIDGETS = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO", CHOICE)
NOTE = "MarkdownNote"  # text on the canvas, known to the editor alone
ACTIVE = 0
Titled = dict[str, tuple[str, dict[str, Any]]]


def to_api(saved: dict[str, Any], object_info: dict[str, Any]) -> Workflow:
    """The graph the editor would queue, node ids as text.

    Raises ValueError when the file holds what is not owned, StockFailsError for a node that this ComfyUI does not have.
    """
    sources = {link: (str(node), slot) for link, node, slot, *_ in saved["links"]}
    graph: Workflow = {}
    for node in saved["nodes"]:
        if node["type"] == NOTE:
            continue
        if node["type"] not in {*object_info, *OURS}:
            raise StockFailsError(f"this ComfyUI has no node {node['type']}")
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
    values = dict(take_values(left, info["input"], info["input_order"]))
    drawn = [each["name"] for each in node.get("inputs", ()) if "widget" in each]
    known = [name for group in info["input_order"].values() for name in group]
    absent = [name for name in drawn if name not in known]  # where the file is from a newer ComfyUI than this
    if len(left) > len(absent):
        raise ValueError(f"node {node['id']} ({node['type']}) has {len(left)} values for no input: {left}")
    return values


def take_values(
    left: list[Any], inputs: dict[str, Any], order: dict[str, list[str]], before: str = ""
) -> Iterator[tuple[str, Any]]:
    """Each input's name and value, taken from the front of `left`; what a choice brings follows the choice."""
    for group in ("required", "optional"):
        for name in order.get(group, ()):
            kind, *rest = inputs[group][name]
            options = rest[0] if rest else {}
            if not is_widget(kind) or options.get("forceInput"):
                continue
            if not left:
                return  # an input added later: the editor takes its default
            value = left.pop(0)
            yield f"{before}{name}", value
            if kind == CHOICE:
                brought = next((each["inputs"] for each in options["options"] if each["key"] == value), {})
                names = {group: list(brought.get(group, ())) for group in brought}
                yield from take_values(left, brought, names, f"{before}{name}.")
            if options.get("control_after_generate"):
                left.pop(0)  # what the editor does with the seed afterwards


def is_widget(kind: str | list[Any]) -> bool:
    """Whether the editor draws an input of this kind as a widget; of several kinds the first decides."""
    return isinstance(kind, list) or kind.partition(",")[0] in WIDGETS


def by_title(graph: Workflow) -> Titled:
    """A graph without its ids: class and inputs by the node's title, links by the title they come from."""
    titles = {name: node["_meta"]["title"] for name, node in graph.items()}
    assert len(set(titles.values())) == len(titles)
    found = {}
    for name, node in graph.items():
        inputs = {
            key: [titles[value[0]], value[1]] if isinstance(value, list) else value
            for key, value in node["inputs"].items()
        }
        found[titles[name]] = (node["class_type"], inputs)
    return found
