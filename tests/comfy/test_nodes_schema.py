"""What saved workflows rely on: node ids, input names, their order and defaults. Only ever added to."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from host.server import PACK_ROOT

RELEASED = json.loads((Path(__file__).parent / "released_nodes.json").read_text())


def shown_inputs(info: dict[str, Any]) -> list[tuple[str, str]]:
    """A node's inputs in the order they are drawn, each with its group: required or optional."""
    return [(group, name) for group in ("required", "optional") for name in info["input_order"].get(group, ())]


def described(info: dict[str, Any]) -> dict[str, Any]:
    """A node as /object_info has it, cut down to what a saved workflow depends on."""
    inputs = []
    for group, name in shown_inputs(info):
        kind, *options = info["input"][group][name]
        default = options[0].get("default") if options else None
        inputs.append({"name": name, "type": kind, "default": default})
    outputs = [[kind, name] for kind, name in zip(info["output"], info["output_name"], strict=True)]
    return {"inputs": inputs, "outputs": outputs}


@pytest.mark.parametrize("node", RELEASED)
def test_a_released_node_keeps_inputs_outputs_and_values_and_an_input_added_since_is_optional(
    node: str, object_info: dict[str, Any]
) -> None:
    info, then = object_info[node], RELEASED[node]
    now = described(info)
    known = [{key: each[key] for key in ("name", "type", "default")} for each in then["inputs"]]
    assert now["inputs"][: len(known)] == known
    assert now["outputs"][: len(then["outputs"])] == then["outputs"]
    names = {each["name"] for each in then["inputs"]}
    assert [name for group, name in shown_inputs(info) if group == "required" and name not in names] == []
    settings = {name: (info["input"][group][name] + [{}])[1] for group, name in shown_inputs(info)}
    for each in then["inputs"]:
        options = settings[each["name"]]
        assert set(each.get("options", ())) <= set(options.get("options", ()))
        if "range" in each:
            low, high = each["range"]
            assert options["min"] <= low <= high <= options["max"]


def test_every_node_of_the_pack_is_in_the_record(object_info: dict[str, Any]) -> None:
    ours = {name for name, info in object_info.items() if info["python_module"] == "custom_nodes.parallel-dit"}
    assert ours == set(RELEASED)


def test_the_packs_root_imports_nothing_before_comfyui_asks() -> None:
    tree = ast.parse((PACK_ROOT / "__init__.py").read_text())
    imported = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert [node.module for node in imported] == ["typing"]
