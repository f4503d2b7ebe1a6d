"""Parallel Model Loader and Parallel Sampler on a model that ComfyUI's own modules compute: latent, report, panel."""

import json
from typing import Any

import pytest
import torch
from rounding import ROUNDING

from families.variants import BY_NAME
from host.client import ComfyClient, Workflow
from host.pack_workflows import parallel, relative_error, saved_latent
from host.server import PACK_ROOT
from parallel_runtime.report.schema import validate
from parallel_runtime.report.text import describe

WAN = BY_NAME["wan 2.1 t2v"]
STEPS = 2
EARLIER_NAMES = {"ParallelFluxLoader": "ParallelModelLoader", "ParallelFluxSampler": "ParallelSampler"}
SAVED = PACK_ROOT / "tests" / "saved_workflows" / "0.2.0" / "flux_pipefusion.ui.json"  # with the earlier names


def ours(graph: Workflow, **settings: Any) -> Workflow:
    """The same graph over two ranks, with both new nodes unless the settings say otherwise."""
    nodes = {"loader": "ParallelModelLoader", "sampler": "ParallelSampler", "mode": "manual", "ulysses": 2}
    return parallel(graph, **nodes | settings)


def info_of(client: ComfyClient) -> dict[str, Any]:
    """The server's description of both names' nodes."""
    return {name: client.object_info(name)[name] for pair in EARLIER_NAMES.items() for name in pair}


@pytest.fixture(scope="module")
def stock(hosted_server: Any) -> torch.Tensor:
    client = ComfyClient(hosted_server.url)
    return saved_latent(client, client.queue(WAN.graph(cfg=3.0, steps=STEPS)))


def test_the_sampler_equals_stock_and_reports_what_it_can_know(hosted_client: ComfyClient, stock: torch.Tensor) -> None:
    result = hosted_client.queue(ours(WAN.graph(cfg=3.0, steps=STEPS)))
    report = result.report()
    assert relative_error(saved_latent(hosted_client, result), stock) <= ROUNDING
    validate(report)
    assert report["model"] == {"file": WAN.file, "dtype": "float32"}
    assert report["plan"]["name"] == "uly2"
    assert report["sizes"] == {"batch": 1, "width": 112, "height": 80, "frames": 5}, "tokens are not known here"
    assert report["loop"] == {"kind": "resident"}
    assert len(report["timings"]["step_s"]) == STEPS
    assert [len(rank["busy_s"]) for rank in report["ranks"]] == [STEPS, STEPS]
    assert min(rank["memory"]["resident_bytes"] for rank in report["ranks"]) > 0
    text = describe(report)
    assert "112 x 80 px, 5 latent frames" in text and WAN.file in text and "uly2" in text and "tokens" not in text
    (pool,) = [pool for pool in hosted_client.get("/parallel_dit/state")["pools"] if len(pool["ranks"]) == 2]
    assert [model["name"] for model in pool["models"]] == [WAN.file]
    assert pool["plans"][-1]["ulysses"] == 2


def test_the_earlier_names_are_deprecated_and_do_the_same(hosted_client: ComfyClient, stock: torch.Tensor) -> None:
    info = info_of(hosted_client)
    for old, new in EARLIER_NAMES.items():
        assert info[old].get("deprecated") is True
        assert not info[new].get("deprecated")
        assert info[old]["input"]["required"] == info[new]["input"]["required"]
    alias = ours(WAN.graph(cfg=3.0, steps=STEPS), loader="ParallelFluxLoader", sampler="ParallelFluxSampler")
    result = hosted_client.queue(alias)
    assert result.report()["model"]["file"] == WAN.file
    assert relative_error(saved_latent(hosted_client, result), stock) <= ROUNDING


def test_comfyui_knows_what_to_put_in_place_of_an_earlier_name(hosted_client: ComfyClient) -> None:
    """Each input keeps its value: the linked by their names, widgets by the places at which a workflow saves them."""
    told, info = hosted_client.get("/node_replacements"), info_of(hosted_client)
    for old, new in EARLIER_NAMES.items():
        (entry,) = told[old]
        assert entry["new_node_id"] == new
        names = {group: list(info[new]["input"].get(group, ())) for group in ("required", "optional")}
        wanted = [{"new_id": name, "old_id": name} for group in names.values() for name in group]
        assert sorted(entry["input_mapping"], key=str) == sorted(wanted, key=str)
        assert [each["new_idx"] for each in entry["output_mapping"]] == list(range(len(info[new]["output"])))
    (sampler,) = told["ParallelFluxSampler"]
    assert sampler["old_widget_ids"][:4] == ["seed", "control_after_generate", "steps", "cfg"]
    saved = json.loads(SAVED.read_text(encoding="utf-8"))
    values = next(node["widgets_values"] for node in saved["nodes"] if node["type"] == "ParallelFluxSampler")
    assert len(values) == len(sampler["old_widget_ids"])
    assert values[sampler["old_widget_ids"].index("sampler_name")] == "euler"


def test_a_stock_model_is_sampled_and_timed(hosted_client: ComfyClient, stock: torch.Tensor) -> None:
    graph = WAN.graph(cfg=3.0, steps=STEPS)
    graph["sampler"]["class_type"] = "ParallelSampler"
    result = hosted_client.queue(graph)
    report = result.report()
    assert torch.equal(saved_latent(hosted_client, result), stock)
    assert report["sizes"]["frames"] == 5
    assert "model" not in report and "plan" not in report
