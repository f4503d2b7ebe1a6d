"""Blueprints as ComfyUI offers them: listed, and drawn from their templates as these are now."""

import json
from typing import Any

import pytest

from host.client import ComfyClient
from host.fetch import WRITTEN_WITH
from host.server import PACK_NAME, PACK_ROOT
from tools.blueprints import BLUEPRINTS, as_blueprint, inside, without_save
from tools.drawn_workflows import as_drawn
from tools.templates import TEMPLATES

from .ui_format import by_title, to_api

FOLDER = PACK_ROOT / "subgraphs"


def saved(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{BLUEPRINTS[name]}.json").read_text())


def template(name: str) -> dict[str, Any]:
    return json.loads((PACK_ROOT / "api_workflows" / f"{name}.json").read_text())


def test_comfyui_lists_every_blueprint_and_serves_its_file(client: ComfyClient) -> None:
    listed = client.get("/global_subgraphs")
    ours = {each["name"]: key for key, each in listed.items() if each["info"]["node_pack"].endswith(PACK_NAME)}
    assert sorted(ours) == sorted(BLUEPRINTS.values())
    assert {path.stem for path in FOLDER.iterdir()} == set(BLUEPRINTS.values())
    for name, file in BLUEPRINTS.items():
        assert json.loads(client.get(f"/global_subgraphs/{ours[file]}")["data"]) == saved(name)


@pytest.mark.parametrize("name", BLUEPRINTS)
def test_a_blueprint_is_its_template_as_that_is_now(name: str, info: dict[str, Any], version: str) -> None:
    held = by_title(to_api(inside(saved(name)), info))
    drawn = as_drawn(without_save(template(name)), info, TEMPLATES[name])
    assert held == by_title(to_api(drawn, info))
    if version == WRITTEN_WITH:
        assert as_blueprint(name, template(name), drawn) == saved(name), "python -m tools.drawn_workflows"
