"""Templates as ComfyUI offers them: each once, drawn from its graph, and what it may download for it."""

import json
from typing import Any

import pytest

from host.client import ComfyClient, PromptRefusedError
from host.fetch import WRITTEN_WITH
from host.outcomes import OURS, StockFailsError
from host.server import PACK_NAME, PACK_ROOT
from tools.drawn_workflows import as_drawn
from tools.templates import FOLDERS, HUB, TEMPLATES, USERS_OWN

from .test_saved_workflows import adds_defaults_alone
from .ui_format import NOTE, by_title, to_api

FOLDER = PACK_ROOT / "example_workflows"
each_template = pytest.mark.parametrize("name", TEMPLATES)


def saved(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text())


def test_comfyui_lists_every_template_once(client: ComfyClient) -> None:
    listed = client.get("/workflow_templates")[PACK_NAME]
    assert sorted(listed) == sorted(TEMPLATES)
    assert {path.stem for path in FOLDER.iterdir()} == set(TEMPLATES)


@each_template
def test_a_server_finds_nothing_wrong_but_the_files_that_comfyui_can_download(
    name: str, client: ComfyClient, info: dict[str, Any]
) -> None:
    file = saved(name)
    with pytest.raises(PromptRefusedError) as refused:
        client.queue(to_api(file, info))
    found = refused.value.body["node_errors"].values()
    errors = [error for node in found for error in node["errors"]]
    of_stock = [error for node in found if node["class_type"] not in OURS for error in node["errors"]]
    if odd := [error for error in of_stock if error["type"] != "value_not_in_list"]:
        raise StockFailsError(f"{odd[0]['message']}: {odd[0]['details']}")
    assert {error["type"] for error in errors} == {"value_not_in_list"}
    if lacks := [error["details"] for error in errors if error["extra_info"]["input_name"] not in FOLDERS]:
        raise StockFailsError(f"this ComfyUI lacks {lacks[0]}")
    missing = {
        (FOLDERS[error["extra_info"]["input_name"]], error["extra_info"]["received_value"])
        for error in errors
        if error["extra_info"]["received_value"] not in USERS_OWN
    }
    offered = [model for node in file["nodes"] for model in node["properties"].get("models", [])]
    assert {(model["directory"], model["name"]) for model in offered} == missing
    for model in offered:
        assert model["url"].startswith(HUB)
        assert model["url"].endswith(f"/{model['name']}")


@each_template
def test_a_template_is_drawn_from_its_graph_and_its_inputs_and_links_are_those_of_its_nodes(
    name: str, info: dict[str, Any], version: str
) -> None:
    """The server passes over inputs that it does not know; the editor joins links by their places.

    In another ComfyUI than the one that it was drawn with a node may have more or less, but not in another order.
    """
    file = saved(name)
    graph = json.loads((PACK_ROOT / "api_workflows" / f"{name}.json").read_text())
    if version == WRITTEN_WITH:
        assert as_drawn(graph, info, TEMPLATES[name]) == file, "python -m tools.drawn_workflows"
        assert adds_defaults_alone(by_title(to_api(file, info)), by_title(graph), info), "the editor queues another"
    nodes = {node["id"]: node for node in file["nodes"]}
    assert len(nodes) == len(file["nodes"])
    for node in (node for node in file["nodes"] if node["type"] != NOTE):
        if node["type"] not in {*info, *OURS}:
            raise StockFailsError(f"this ComfyUI has no node {node['type']}")
        about = info[node["type"]]
        known = [each for group in ("required", "optional") for each in about["input_order"].get(group, ())]
        drawn, outputs = [each["name"] for each in node["inputs"]], [each["type"] for each in node["outputs"]]
        if version == WRITTEN_WITH or node["type"] in OURS:
            assert (drawn, outputs) == (known, about["output"])
        assert [each for each in drawn if each in known] == [each for each in known if each in drawn]
        both = min(len(outputs), len(about["output"]))
        assert outputs[:both] == about["output"][:both]
    for link, source, slot, target, place, kind in file["links"]:
        assert nodes[target]["inputs"][place]["link"] == link
        assert kind in nodes[target]["inputs"][place]["type"].split(",")
        assert nodes[source]["outputs"][slot]["type"] == kind
        assert link in nodes[source]["outputs"][slot]["links"]
