"""What reaches into a model whose weights are elsewhere: refused before any step runs, by the node to remove."""

import re

import pytest

from host.client import ComfyClient, Workflow
from host.tiny_models import TinyModels
from host.workflows import node
from tools.refusals_table import DOCUMENT, has_node, message, row

from .cases import CASES, Case


def names(case: Case) -> str:
    return case.what


def unnamed(line: str) -> str:
    """A row without the name that a node is shown by, which differs between ComfyUIs."""
    return re.sub(r"\| [^|]+ \(node ", "| (node ", line)


@pytest.mark.parametrize("case", CASES, ids=names)
def test_what_cannot_run_remotely_is_refused_by_name_before_a_step(
    case: Case, client: ComfyClient, tiny_models: TinyModels
) -> None:
    if not has_node(client, case):  # the rows of newer nodes are held by a newer ComfyUI
        assert f"| {case.what} |" in DOCUMENT.read_text(encoding="utf-8")
        return
    said = message(client, case, tiny_models)
    assert [part for part in case.says if part not in said] == [], said
    assert any(remedy in said for remedy in ("remove", "use ", "set ")), "nothing says what to do"
    rows = map(unnamed, DOCUMENT.read_text(encoding="utf-8").splitlines())
    assert unnamed(row(case, said)) in rows, "make refusals writes the table"


def stock(graph: Workflow) -> Workflow:
    inputs = {"unet_name": graph["model"]["inputs"]["unet_name"], "weight_dtype": "default"}
    kept = {name: node for name, node in graph.items() if name != "config"}
    return kept | {"model": node("UNETLoader", **inputs)}


@pytest.mark.full
@pytest.mark.parametrize("case", [case for case in CASES if case.stock], ids=names)
def test_stock_comfyui_takes_the_same_graph(case: Case, client: ComfyClient, tiny_models: TinyModels) -> None:
    client.queue(stock(case.build(tiny_models))).require_success()


def test_the_table_has_no_other_rows() -> None:
    assert DOCUMENT.read_text(encoding="utf-8").count("\n| ") == len(CASES) + 2
