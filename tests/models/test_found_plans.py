"""A plan that is found by looking at a model's calls equals one process, or is refused with the module's name.

Owns: what is found of a class whose plan people wrote, and of models in odd shapes. The sweep over all classes is
`python -m tools.find_plans`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from torch import nn

from parallel_runtime.models.finder import Candidate, NotFoundError, look, plans
from parallel_runtime.models.hosted.finding import attention_to
from parallel_runtime.models.hosted.hooks import SharedModel
from parallel_runtime.models.specs.written import from_data, to_data

from .cases import CASES
from .gloo_group import GlooGroup, OwnTokensOnly
from .odd import made
from .ranks import in_ranks
from .tiny import call, difference

ERROR, CONTROL = 1e-5, 1e-3


def candidates(model: nn.Module, inputs: dict[str, Any]) -> list[Candidate]:
    """The plans that explain a call."""
    return list(plans([look(model, partial(call, model, inputs), attention_to)]))


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        (
            "Wan 5B, a timestep for each frame",
            {"blocks.0": {"x": "img"}, "blocks.*": {"freqs": "img", "e": "frames4:img"}, "head": {"e": "frames3:img"}},
        ),
        (
            "Flux.1, ControlNet and mask",
            {
                "double_blocks.0": {"img": "img", "txt": "txt"},
                "double_blocks.*": {"pe": "txt+img@2", "attn_mask": "order:txt+img"},
                "single_blocks.*": {"pe": "txt+img@2", "attn_mask": "order:txt+img"},
            },
        ),
        (
            "Cosmos Predict2, a timestep for each frame",
            {
                "blocks.0": {"x_B_T_H_W_D": "grid@1"},
                "blocks.*": {"rope_emb_L_1_1_D": "flat:grid@1", "extra_per_block_pos_emb": "grid@1"},
            },
        ),
        (
            "Mochi, cropped text",
            {
                "blocks.0": {"x": "img", "y": "txt"},
                "blocks.*": {"**rope_cos": "img@0", "**rope_sin": "img@0", "**crop_y": "index:txt"},
            },
        ),
    ],
)
@in_ranks(2)
def test_what_is_found_is_what_people_wrote_and_equals_one_process(
    group: GlooGroup, name: str, cut: dict[str, Any]
) -> None:
    """Each rank looks by itself and finds the same."""
    model, inputs = CASES[name]()
    want = call(model, inputs)
    spec = candidates(model, inputs)[0].spec
    assert {path: dict(words) for path, words in spec.cut.items()} == cut
    assert from_data(to_data(spec)) == spec
    shared = SharedModel(model, spec, group)
    assert difference(call(model, inputs), want) <= ERROR
    shared.group = OwnTokensOnly()
    assert difference(call(model, inputs), want) > CONTROL


@pytest.mark.parametrize("name", ["plain", "u-shaped", "registers", "mixes frames"])
@in_ranks(2)
def test_an_odd_model_is_equal_or_refused(group: GlooGroup, name: str) -> None:
    """The plan that cuts least is tried where those that cut more differ, as the proof does."""
    model, inputs = made(name)
    want = call(model, inputs)
    try:
        found = candidates(model, inputs)
    except NotFoundError as error:
        assert {"mixes frames": "blocks.0", "u-shaped": "blocks.1 has 18 tokens"}[name] in str(error)
        return
    shared = SharedModel(model, found[-1].spec, group)
    assert difference(call(model, inputs), want) <= ERROR
    shared.group = OwnTokensOnly()
    assert difference(call(model, inputs), want) > CONTROL
    assert name in ("plain", "registers")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tokens in the batch", "blocks.0"),
        ("state between calls", "keeps state between calls"),
        ("another order", "another order"),
    ],
)
@in_ranks(1)
def test_what_no_words_describe_is_refused_by_its_name(group: GlooGroup, name: str, said: str) -> None:
    with pytest.raises(NotFoundError, match=said):
        candidates(*made(name))


@in_ranks(2)
def test_a_model_that_does_not_hear_its_attention_gives_a_proof_nothing_to_see(group: GlooGroup) -> None:
    model, inputs = made("deaf")
    want = call(model, inputs)
    shared = SharedModel(model, candidates(model, inputs)[0].spec, group)
    shared.group = OwnTokensOnly()
    assert difference(call(model, inputs), want) <= ERROR
