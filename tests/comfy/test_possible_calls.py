"""Whether a class takes a smaller call is tried without values, also where it keeps something between calls."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from models.keeper import PLAN, WIDTH, Keeper
from parallel_runtime.models.hosted.calls import to_tree
from parallel_runtime.models.hosted.count_kept import Roomy
from parallel_runtime.pool.calls import ModelCall


class OnMeta(Keeper):
    """Asks no ComfyUI for its attention."""

    attention = staticmethod(F.scaled_dot_product_attention)


@pytest.mark.parametrize(("keeps", "possible"), [(True, [True, True, False]), (False, [True, False, False])])
def test_a_class_that_keeps_something_compares_no_values_that_are_not_there(
    keeps: bool, possible: list[bool], module_of_pack: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ComfyUI lets it keep something before each run; the second call would be compared with the first."""
    proving: ModuleType = module_of_pack("nodes.host.proving")
    monkeypatch.setattr(proving, "find_plan", lambda kind: PLAN if keeps else None)
    model = OnMeta().to("meta")
    model.memory = Roomy()
    prover = proving.Prover(model, None, SimpleNamespace(keeps_state=True), lambda shape: 1.0)
    found = []
    for numbers in (35, 35, 36):
        model.enabled = True
        x, context = torch.zeros(1, 35, WIDTH), torch.zeros(1, 9, WIDTH)
        tree, tensors = to_tree({"args": [x, context], "kwargs": {"transformer_options": {}}})
        named = {f"t{number}": tensor for number, tensor in enumerate(tensors)}
        shape = (1, numbers * WIDTH)
        call = ModelCall(tensors=named, out_shape=shape, out_dtype=torch.float32, options={"call": tree})
        found.append(prover._possible(call))
    assert found == possible
