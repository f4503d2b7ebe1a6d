"""Functions of stock nodes that ranks have themselves: blocks skipped by Skip Layer Guidance, attention by its name."""

from typing import Any

import pytest
from comfy.test_auto_each_run import stock_graph
from rounding import ROUNDING

from families.hosted import VISIBLE, between
from host import workflows
from host.client import ComfyClient, Workflow
from host.fetch import comfyui_says
from host.pack_workflows import latent_of, parallel, relative_error
from host.tiny_models import TinyModels

LAYERS = {"double_layers": "0", "single_layers": "0, 1", "start_percent": 0.0, "end_percent": 1.0}
SKIPPING = {
    "SkipLayerGuidanceDiT": {**LAYERS, "scale": 3.0, "rescaling_scale": 0.2},
    "SkipLayerGuidanceDiTSimple": LAYERS,
}
PLANS: dict[str, dict[str, Any]] = {
    "ulysses": {"ulysses": 2},
    "ring, sharded": {"ring": 2, "weights": "sharded"},
    "cfg": {"cfg": 2},
    "pipefusion": {"pipefusion": 2, "warmup_steps": 3},  # all steps, so that it is exact
}


def skipping(tiny: TinyModels, kind: str) -> Workflow:
    graph = stock_graph(tiny, width=64, height=96, steps=3, cfg=2.0)
    return between(graph, "skip", kind, **SKIPPING[kind])


@pytest.mark.parametrize(
    ("kind", "plans"), [("SkipLayerGuidanceDiT", list(PLANS)), ("SkipLayerGuidanceDiTSimple", ["ulysses"])]
)
def test_skip_layer_guidance_equals_stock_under_each_kind_of_plan(
    kind: str, plans: list[str], client: ComfyClient, tiny_models: TinyModels
) -> None:
    graph = skipping(tiny_models, kind)
    right = latent_of(client, graph)
    graph["skip"]["inputs"] |= {"double_layers": "", "single_layers": ""}
    assert relative_error(latent_of(client, graph), right) > VISIBLE, "nothing was skipped in stock"
    graph = skipping(tiny_models, kind)
    for name in plans:
        mine = latent_of(client, parallel(graph, mode="manual", **PLANS[name]))
        assert relative_error(mine, right) <= ROUNDING, name


if comfyui_says("comfy_extras.nodes_model_advanced", "class ModelAttentionBackend"):  # since 0.33

    def test_attention_by_its_name_equals_stock_under_each_kind_of_plan(
        client: ComfyClient, tiny_models: TinyModels
    ) -> None:
        graph = workflows.text_to_image(tiny_models, width=64, height=64)
        graph = between(graph, "backend", "ModelAttentionBackend", attention="pytorch attention")
        right = latent_of(client, graph)
        for plan in PLANS.values():
            assert relative_error(latent_of(client, parallel(graph, mode="manual", **plan)), right) <= ROUNDING
