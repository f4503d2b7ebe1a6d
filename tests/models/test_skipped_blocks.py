"""Blocks of ComfyUI's own classes that a rank skips, as one process does with stock's function in their place.

Does not own how a call says which blocks (tests/comfy/test_stock_functions_in_ranks.py).
"""

from typing import Any

import pytest
from rounding import ROUNDING
from torch import Tensor, nn

from parallel_runtime.models.hosted.hooks import SharedModel
from parallel_runtime.models.hosted.stock_functions import SkippedBlocks, why_not_skipped
from parallel_runtime.models.specs import spec_of

from .cases import CASES
from .gloo_group import GlooGroup
from .ranks import in_ranks
from .tiny import call, difference

EFFECT = 1e-3
BLOCKS = [("double_block", 0)], [("double_block", 1)], [("double_block", 0), ("double_block", 1)]


def replacing(model: nn.Module, inputs: dict[str, Any], replaced: dict[str, Any]) -> Tensor:
    """The model's output with functions in the place of blocks."""
    options = {**inputs.get("transformer_options", {}), "patches_replace": replaced}
    return model(**{**inputs, "transformer_options": options}).flatten()


@pytest.mark.parametrize("name", ["Flux.1", "Kandinsky 5"])
@in_ranks(2)
def test_a_rank_skips_blocks_as_stocks_function_does(group: GlooGroup, name: str) -> None:
    model, inputs = CASES[name]()
    assert why_not_skipped(type(model)) == ""
    skip, all_run = {"dit": {place: lambda args, _: args for blocks in BLOCKS for place in blocks}}, call(model, inputs)
    wanted = [replacing(model, inputs, {"dit": {place: skip["dit"][place] for place in blocks}}) for blocks in BLOCKS]
    SharedModel(model, spec_of(type(model)), group)
    skipped = SkippedBlocks(model, spec_of(type(model)))
    for blocks, want in zip(BLOCKS, wanted, strict=True):
        got = replacing(model, inputs, skipped.replacing(blocks))
        assert difference(got, want) <= ROUNDING, blocks
        assert difference(want, all_run) > EFFECT, blocks
    assert difference(call(model, inputs), all_run) <= ROUNDING
