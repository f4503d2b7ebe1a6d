"""Draws a workflow in API form for the template browser: the file the editor would save, and its thumbnail.

A thumbnail shows the graph and, where the demo's small Flux can run the template, what it drew over two CPU ranks.

`PYTHONPATH=tests python -m tools.drawn_workflows [NAME...]` makes example_workflows/NAME.json and .jpg of
api_workflows/NAME.json (default: all), from a real server's description of the nodes, and its blueprint in subgraphs/
where it has one. Owns where nodes are put and how a thumbnail looks. Does not own: its words, and where files are
downloaded from (templates.py); a blueprint's form (blueprints.py).
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from demo.graphs import demo_server, find, with_demo_files
from host.client import ComfyClient, Workflow
from host.server import PACK_ROOT
from parallel_runtime.plan import AXES, PIPELINE_KEYS
from saved_workflows.ui_format import CHOICE, NOTE, is_widget

from .blueprints import BLUEPRINTS, as_blueprint, without_save
from .templates import TEMPLATES, Template, downloads, offered

COLUMN, WIDTH, GAP, LEFT, TOP = 370, 320, 50, 40, 60
ROW, HEAD = 26, 70
# Rows beside those of inputs: a text box, a picture, what the panel draws on our own nodes.
MORE = {"CLIPTextEncode": 110, "SaveImage": 260, "SaveAnimatedWEBP": 260, "SPConfig": 240, "TimedVAEDecode": 90}
MORE |= {"ParallelSampler": 90 + ROW, "MiniMaxH3ImageToVideo": 110, "SaveVideo": 260, "ShowTimingReport": 352}
# The column of a node, by what it is; the first that its class has in its name.
COLUMNS = (("Loader", 0), ("SPConfig", 0), ("Sampling", 0), ("Parallelize", 0), ("Primitive", 0), ("Sampler", 2))
COLUMNS += (
    ("Scheduler", 2),
    ("Benchmark", 2),
    ("Report", 3),
    ("Separate", 3),
    ("Decode", 3),
    ("CreateVideo", 4),
    ("Save", 4),
)
# What SP Config has no row for under auto, as web/panel/nodes.mjs has it.
MANUAL_ONLY = frozenset((*AXES, *PIPELINE_KEYS))
NOTE_SIZE = (3 * COLUMN - GAP, 360)
THUMBNAIL, TITLE, MARGIN = (640, 400), 76, 14  # a band of TITLE pixels with the words, the graph below
RESULT = THUMBNAIL[1] - TITLE - MARGIN  # pixels of what was drawn, beside the graph
# What the demo's model draws for the templates that it can run.
PROMPTS = {
    "flux_parallel": "a rocket on blue, centre",
    "flux_batch_over_replicas": "a red apple on white, top left",
    "flux_pipefusion": "a penguin on yellow, centre",
}
BACKGROUND, STOCK, OURS, EDGE, TEXT = (32, 32, 32), (53, 53, 53), (47, 79, 111), (101, 168, 224), (221, 221, 221)
LINKS = {"MODEL": (178, 157, 219), "CLIP": (255, 213, 0), "VAE": (255, 110, 110), "CONDITIONING": (255, 168, 49)}
LINKS |= {"LATENT": (255, 156, 249), "IMAGE": (100, 181, 246), "SP_CONFIG": (139, 195, 74)}


def as_drawn(graph: Workflow, info: dict[str, Any], template: Template) -> dict[str, Any]:
    """The file that the editor would save of this graph with the template's note; `info` is /object_info of a server.

    Raises KeyError for a node that the server lacks, and for a model file without an address.
    """
    numbers = {name: number for number, name in enumerate(graph, start=1)}
    links: list[list[Any]] = []
    nodes = [_node(number, graph[name], info, numbers, links) for name, number in numbers.items()]
    for node in nodes:
        for slot, output in enumerate(node["outputs"]):
            output["links"] = [link[0] for link in links if link[1:3] == [node["id"], slot]] or None
    _place(nodes)
    nodes.append(as_note(len(nodes) + 1, template.note(offered(nodes))))
    kept = {"groups": [], "config": {}, "extra": {}, "version": 0.4}
    return {"last_node_id": len(nodes), "last_link_id": len(links), "nodes": nodes, "links": links, **kept}


def inputs_of(about: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Each input's name, kind and options with the default, of a node, in the order in which they are drawn."""
    for group in ("required", "optional"):
        for name in about["input_order"].get(group, ()):
            kind, *rest = about["input"][group][name]
            options = dict(rest[0]) if rest else {}
            if isinstance(kind, list):
                kind, options = "COMBO", {"default": next(iter(kind), ""), **options}
            if kind in ("COMBO", CHOICE):
                first = next(iter(options.get("options", ())), "")
                options.setdefault("default", first["key"] if kind == CHOICE else first)
            yield name, kind, options


def _node(
    number: int, node: dict[str, Any], info: dict[str, Any], numbers: dict[str, int], links: list[list[Any]]
) -> dict[str, Any]:
    about, given = info[node["class_type"]], node["inputs"]
    inputs, values = [], []
    for place, (name, kind, options) in enumerate(inputs_of(about)):
        entry: dict[str, Any] = {"name": name, "type": kind, "link": None}
        linked = isinstance(given.get(name), list)
        if is_widget(kind):
            entry["widget"] = {"name": name}
            values.append(options.get("default") if linked else given.get(name, options.get("default")))
            values += ["fixed"] if options.get("control_after_generate") else []
        if linked:
            source, slot = given[name]
            entry["link"] = len(links) + 1
            links.append([len(links) + 1, numbers[source], slot, number, place, kind.partition(",")[0]])
        inputs.append(entry)
    outputs = [{"name": name, "type": kind} for kind, name in zip(about["output"], about["output_name"], strict=True)]
    shown = [name for name, kind, options in inputs_of(about) if _is_shown(name, options, given)]
    height = HEAD + ROW * max(len(shown), len(outputs)) + MORE.get(node["class_type"], 0)
    properties: dict[str, Any] = {"Node name for S&R": node["class_type"]}
    if files := downloads(given):
        properties["models"] = files
    return {
        **{"id": number, "type": node["class_type"], "pos": [0, 0], "size": [WIDTH, height], "flags": {}},
        **{"order": number - 1, "mode": 0, "inputs": inputs, "outputs": outputs, "title": node["_meta"]["title"]},
        **{"properties": properties, "widgets_values": values},
    }


def _is_shown(name: str, options: dict[str, Any], given: dict[str, Any]) -> bool:
    """Whether an input has a row on the node as it opens: of advanced ones those that the graph sets."""
    if options.get("advanced"):
        return given.get(name, options.get("default")) != options.get("default")
    return given.get("mode") != "auto" or name not in MANUAL_ONLY


def as_note(number: int, text: str) -> dict[str, Any]:
    """A note above the graph."""
    return {
        **{"id": number, "type": NOTE, "pos": [LEFT, TOP - GAP - NOTE_SIZE[1]], "size": list(NOTE_SIZE), "flags": {}},
        **{"order": number - 1, "mode": 0, "inputs": [], "outputs": [], "title": "About this template"},
        **{"properties": {}, "widgets_values": [text]},
    }


def _place(nodes: Sequence[dict[str, Any]]) -> None:
    """Put each node below the ones before it in its column."""
    below: dict[int, int] = {}
    for node in nodes:
        column = next((at for part, at in COLUMNS if part in node["type"]), 1)
        node["pos"] = [LEFT + COLUMN * column, below.get(column, TOP)]
        below[column] = node["pos"][1] + node["size"][1] + GAP


def thumbnail(drawn: dict[str, Any], template: Template, results: Sequence[Image.Image] = ()) -> Image.Image:
    """What the template browser shows: words, what was drawn, and the graph, our own nodes in blue."""
    picture = wiring(drawn, template, THUMBNAIL[0] - (RESULT + 2 * MARGIN if results else 0))
    across = 1 if len(results) == 1 else 2
    for number, result in enumerate(results):
        row, column = divmod(number, across)
        small = result.resize([(RESULT - across + 1) // across] * 2, Image.Resampling.LANCZOS)
        left, top = THUMBNAIL[0] - RESULT - MARGIN, TITLE
        picture.paste(small, (left + column * RESULT // across, top + row * RESULT // across))
    return picture


def drawn_by_the_demo(client: ComfyClient, graph: Workflow, prompt: str) -> list[Image.Image]:
    """The pictures that a template's graph makes with the demo's model over two ranks."""
    graph = with_demo_files(graph, prompt)
    graph[find(graph, "SPConfig")]["inputs"]["devices"] = "cpu:2"
    result = client.queue(graph, timeout_s=600).require_success()
    return [client.image(item) for item in result.outputs[find(graph, "SaveImage")]["images"]]


def wiring(drawn: dict[str, Any], template: Template, width: float) -> Image.Image:
    """Words, and the graph with our own nodes in blue and links by what they carry, in so much of the width."""
    nodes = {node["id"]: node for node in drawn["nodes"] if node["type"] != NOTE}
    right = max(node["pos"][0] + node["size"][0] for node in nodes.values())
    bottom = max(node["pos"][1] + node["size"][1] for node in nodes.values())
    across = min((width - 2 * MARGIN) / (right - LEFT), 0.5)
    down = min((THUMBNAIL[1] - TITLE - MARGIN) / (bottom - TOP), across)
    picture = Image.new("RGB", THUMBNAIL, BACKGROUND)
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(10)
    draw.text((MARGIN, 6), template.family, fill=EDGE, font=ImageFont.load_default(36))
    draw.text((MARGIN, 46), template.makes, fill=TEXT, font=ImageFont.load_default(22))

    def at(x: float, y: float) -> tuple[float, float]:
        return MARGIN + (x - LEFT) * across, TITLE + (y - TOP) * down

    for _, source, slot, target, place, kind in drawn["links"]:
        one, other = nodes[source], nodes[target]
        start = at(one["pos"][0] + WIDTH, one["pos"][1] + 40 + 20 * slot)
        end = at(other["pos"][0], other["pos"][1] + 40 + 20 * place)
        draw.line((start, end), fill=LINKS.get(kind, TEXT), width=1)
    for node in nodes.values():
        (left, top), size = at(*node["pos"]), node["size"]
        ours = "Parallel" in node["type"] or node["type"] in ("SPConfig", "TimedVAEDecode")
        box = (left, top, left + size[0] * across, top + size[1] * down)
        draw.rounded_rectangle(box, 4, fill=OURS if ours else STOCK, outline=EDGE if ours else BACKGROUND)
        title, room = node["title"], size[0] * across - 6
        while font.getlength(title) > room:
            title = title[:-1]
        draw.text((left + 4, top + 3), title, fill=TEXT, font=font)
    return picture


def text_of(drawn: dict[str, Any]) -> str:
    """The file's text: a line for each node and each link, so that a change can be read."""
    lines = []
    for key, value in drawn.items():
        if key in ("nodes", "links"):
            value = [json.dumps(each, ensure_ascii=False) for each in value]
            lines.append(f'  "{key}": [\n    ' + ",\n    ".join(value) + "\n  ]")
        else:
            lines.append(f'  "{key}": {json.dumps(value)}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def main(names: Sequence[str]) -> None:
    """Draw these workflows, or all."""
    pictures = {}
    with tempfile.TemporaryDirectory() as base, demo_server(Path(base)) as server:
        client = ComfyClient(server.url)
        info = client.object_info()
        for name in PROMPTS.keys() & set(names or TEMPLATES):
            graph = json.loads((PACK_ROOT / "api_workflows" / f"{name}.json").read_text())
            pictures[name] = drawn_by_the_demo(client, graph, PROMPTS[name])
    for name in names or TEMPLATES:
        graph = json.loads((PACK_ROOT / "api_workflows" / f"{name}.json").read_text())
        drawn = as_drawn(graph, info, TEMPLATES[name])
        target = PACK_ROOT / "example_workflows" / f"{name}.json"
        target.write_text(text_of(drawn))
        results = pictures.get(name, ())
        thumbnail(drawn, TEMPLATES[name], results).save(target.with_suffix(".jpg"), quality=88)
        if name in BLUEPRINTS:
            blueprint = as_blueprint(name, graph, as_drawn(without_save(graph), info, TEMPLATES[name]))
            target = PACK_ROOT / "subgraphs" / f"{BLUEPRINTS[name]}.json"
            target.write_text(json.dumps(blueprint, ensure_ascii=False, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
