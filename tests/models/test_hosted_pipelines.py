"""PipeFusion of ComfyUI's own classes: exact in warm-up, then what one process with keys of the step before computes.

Owns the bounds. How a pipeline and its simulation run is pipelines.py's.
"""

import pytest
import torch
from rounding import ROUNDING

from parallel_runtime.models.hosted.stage import HandedOn
from parallel_runtime.models.specs import SPECS
from tools.known import cases

from .cases import CASES as ALL
from .gloo_group import GlooGroup
from .pipelines import errors
from .ranks import in_ranks

STALE = 1e-4  # a pipeline that differed less from the module itself would not show that its keys are old

# Streams of one kind and of two, a mask, residuals between blocks, a row a frame, a grid, a refiner before the stages.
CASES = (
    *("PixArt alpha", "SD3.5 medium, ControlNet", "Qwen-Image, text mask", "Wan 5B, a timestep for each frame"),
    *("Z-Image", "Cosmos Predict2, an upright image (Anima)"),
)
KINDS = {(2, "ulysses"): CASES, (4, "ulysses"): CASES[1::2], (4, "ring"): CASES[::2]}
FEW = "Flux.1, 3 tokens of text and 3 of image"  # a token a patch, so none for each of two ranks
STAGED = [each.name for each in cases().values() if each.name in ALL and SPECS[each.path].one_stage == ""]
RUNS = [
    pytest.param(name, kind, ranks, id=f"{ranks} {kind}, {name}", marks=() if name in some else pytest.mark.full)
    for (ranks, kind), some in KINDS.items()
    for name in STAGED
    if (ranks, name) != (4, FEW)
]


@pytest.mark.parametrize(("name", "kind", "ranks"), RUNS)
@in_ranks()
def test_a_pipeline_is_exact_in_warm_up_and_as_stale_as_one_process_after_it(
    group: GlooGroup, name: str, kind: str
) -> None:
    found = errors(group, name, kind)
    if group.index == group.parts - 1:
        assert max(found["warm"], found["simulated"]) <= ROUNDING, found
        assert found["stale"] > STALE, found


class Block(torch.nn.Module):
    """Takes what it has no name for."""

    def forward(self, x: object, *more: object, mask: object = None) -> None:
        """Never called."""


def test_what_a_block_hands_on_has_a_name_or_a_place_in_its_arguments() -> None:
    by_place, both = HandedOn("#2", Block()), HandedOn(("x", "mask", "#1"), Block())
    assert by_place.read((1, 2, 3), {}) == 3 and by_place.write((1, 2, 3), {}, 9) == ((1, 2, 9), {})
    assert both.read((1, 2, 3), {"mask": 4}) == (1, 4, 2)
    assert both.write((1, 2, 3), {"mask": 4}, (7, 8, 9)) == ((7, 9, 3), {"mask": 8})
