"""Hooks on ComfyUI's classes: what is refused, what is left behind, what is asked for.

Does not own: parity of models (test_hosted_parity.py), attention's arguments (test_hosted_attention.py).
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from rounding import ROUNDING
from torch import nn

from parallel_runtime.models.hosted.attention import installed
from parallel_runtime.models.hosted.hooks import SharedModel
from parallel_runtime.models.specs import ShardingSpec, spec_of
from parallel_runtime.proof import relative_error
from tools.try_plan import Outputs, first_unlike

from .cases import CASES
from .gloo_group import GlooGroup
from .ranks import in_ranks, refused
from .tiny import noise


def fresh(name: str) -> tuple[nn.Module, ShardingSpec, dict[str, Any]]:
    """A case's model that no hook was on, its plan and its inputs."""
    model, inputs = CASES[name]()
    return model, spec_of(type(model)), inputs


def number_of_hooks(model: nn.Module) -> int:
    """Of all modules."""
    return sum("forward" in vars(each) for each in model.modules())


@in_ranks(2)
def test_a_wrong_plan_is_told_by_the_first_module_that_it_changes(group: GlooGroup) -> None:
    model, plan, inputs = fresh("Flux.1")
    whole = Outputs(model)
    model(**inputs)
    whole.remove()
    wrong = {**plan.cut, "double_blocks.*": {"pe": "img+txt@2"}}
    for each, module in ((plan, None), (replace(plan, cut=wrong), "double_blocks.0.img_attn.proj (Linear)")):
        mine = Outputs(model)
        shared = SharedModel(model, each, group)
        model(**inputs)
        shared.remove()
        mine.remove()
        assert len(mine.found) == len(whole.found) > 50
        first = first_unlike(mine.found, whole.found)
        assert (first and first["module"]) == module, f"{module}: {first}"


# Calls in which every stream, or every one that a plan cuts, has one token: case -> shapes of inputs.
ONE_TOKEN = {
    "Flux.1, mask": {"x": (2, 16, 2, 2), "context": (2, 1, 48), "attention_mask": (2, 2, 2)},
    "Wan t2v": {"x": (2, 16, 1, 2, 2)},
    "Cosmos 1": {"x": (1, 16, 1, 2, 2)},
    "SD3.5 large": {"x": (2, 16, 2, 2), "context": (2, 1, 48)},
}


@in_ranks(2)
def test_every_rank_computes_one_token_and_the_next_call_is_shared(group: GlooGroup) -> None:
    for name, shapes in ONE_TOKEN.items():
        model, plan, inputs = fresh(name)
        tiny = inputs | {key: noise(*shape) for key, shape in shapes.items()}
        want, want_tiny = model(**inputs), model(**tiny)
        group.attentions = 0
        SharedModel(model, plan, group)
        assert relative_error(model(**tiny), want_tiny) <= ROUNDING, f"{name}: one token"
        assert group.attentions == 0, f"{name}: there was nothing to exchange"
        assert relative_error(model(**inputs), want) <= ROUNDING, f"{name}: the next call"
        assert group.attentions > 0, name


@in_ranks(2)
def test_a_forward_that_raises_leaves_nothing(group: GlooGroup) -> None:
    model, plan, inputs = fresh("Wan t2v")
    want = model(**inputs)
    shared = SharedModel(model, plan, group)

    def fail(*_: object) -> None:
        raise RuntimeError("in the middle")

    handle = model.blocks[1].self_attn.q.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        model(**inputs)
    handle.remove()
    assert installed().call is None and shared.call is None
    shared.group = None
    assert torch.equal(model(**inputs), want)
    shared.group = group
    assert relative_error(model(**inputs), want) <= ROUNDING


@in_ranks(2)
def test_lengths_that_streams_tell_are_not_asked_for(group: GlooGroup) -> None:
    for name in ("Flux.1", "Wan i2v", "Cosmos 1", "SD3.5 medium, ControlNet"):
        model, plan, inputs = fresh(name)
        asked: list[torch.Size] = []
        group.gather = lambda each, to=asked, **more: to.append(each.shape) or GlooGroup.gather(group, each, **more)
        SharedModel(model, plan, group)
        model(**inputs)
        embedders = 2 * (name == "Cosmos 1")  # modules that need all tokens
        assert len(asked) == 1 + embedders, f"{name}: {asked}"


@in_ranks(2)
def test_a_controlnets_lists_are_cut_for_the_call_alone(group: GlooGroup) -> None:
    model, plan, inputs = fresh("Flux.1, ControlNet and mask")
    shared = SharedModel(model, plan, group)
    control = inputs["control"]
    kept = {name: list(each) for name, each in control.items()}
    model(**inputs)
    assert all(one is other for name in kept for one, other in zip(kept[name], control[name], strict=True))
    by_place = {name: each for name, each in inputs.items() if name not in ("x", "timestep", "context", "control")}
    arguments = [inputs["x"], inputs["timestep"], inputs["context"], by_place.pop("y"), by_place.pop("guidance"), None]
    assert torch.equal(model(*arguments, control, **by_place), model(**inputs))
    with refused("Flux: a ControlNet's list 'middle' is not in the plan", "input, output"):
        shared.moved = lambda _, rows: rows
        model(**{**inputs, "control": {**control, "middle": control["input"]}})
    assert shared.moved is None, "it would hold the refused call's residuals"


@in_ranks(2)
def test_lists_that_a_class_takes_before_its_first_block_are_cut_too(group: GlooGroup) -> None:
    """As HunyuanDiT does; the same residual for two blocks."""
    model, plan, inputs = fresh("HunyuanDiT, long skips")
    residual = noise(2, 35, 96)
    inputs["control"] = {"output": [residual, residual], "input": None}
    want, plain = model(**whole_lists(inputs)), model(**whole_lists(inputs | {"control": None}))
    assert relative_error(plain, want) > 1e-3, "the ControlNet changes nothing"
    SharedModel(model, plan, group)
    for _ in range(2):
        assert relative_error(model(**inputs), want) <= ROUNDING
    assert inputs["control"]["output"] == [residual, residual], "the class takes them from a list of its own"


def whole_lists(inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs with lists that stock's class may empty."""
    control = inputs["control"] and {name: each and list(each) for name, each in inputs["control"].items()}
    return inputs | {"control": control}


@in_ranks(2)
def test_a_model_in_which_an_attribute_is_set_that_a_plan_excludes_is_refused_with_both_names(group: GlooGroup) -> None:
    model, plan, _ = fresh("Stable Audio 1")
    windowed = {"transformer.layers": {"ff": "x within width"}}
    for wrong in ({"unless": {"transformer": "width"}}, {"attention": windowed}):
        with refused("AudioDiffusionTransformer", "no attribute 'width'", "use a ComfyUI that the plan was made for"):
            SharedModel(model, replace(plan, **wrong), group)
    model.transformer.layers[1].self_attn.feat_scale = True
    with refused("transformer.layers.1.self_attn has feat_scale", "use cfg parallel"):
        SharedModel(model, plan, group)
    assert number_of_hooks(model) == 0
