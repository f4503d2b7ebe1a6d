"""Words of plans, plans, and which class has which: pure data, without torch and ComfyUI.

Does not own: what a word means (test_cuts.py), a plan against ComfyUI's class (test_hosted_parity.py).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from parallel_runtime.models.specs import SPECS, WITHOUT, ShardingSpec, not_sampled, spec_of
from parallel_runtime.models.specs.words import introduced_by, parse

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "text",
    ["", "rangs:img", "img@", "img@x", "img img", "txt++img", "*", "*+img", "ranges:img@2", "order4:img", "index:a+b"]
    + ["frames:-x", "last:-x", "order:grid", "guides:a+b", "grid+img", "IMG", "img+*@2+a", "--img"]
    + ["every:a+b", "rest:img", "rest:txt+-img", "rest:txt+img@2", "heads:txt+img", "heads:-img"],
)
def test_a_word_that_is_none_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ValueError, match="no word of|takes|no stream|stands|none of") as error:
        ShardingSpec(attention={}, cut={"a.0": {"x": "img"}, "a.*": {"y": text}}, gather={"b": "img"})
    assert repr(text) in str(error.value)


@pytest.mark.parametrize(
    "text",
    ["", "vid<-", "a<-b<-c", "-txt+img", "txt@2", "Local", "?", "img|local|txt", "a+b within w", "x within", "x again"],
)
def test_a_word_of_attention_that_is_none_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ValueError, match="says nothing of attention") as error:
        ShardingSpec(attention={"blocks": {"attn": text}}, cut={"a.0": {"x": "img"}}, gather={"b": "img"})
    assert repr(text) in str(error.value)


def test_a_number_that_all_have_and_what_is_left_give_lengths() -> None:
    assert introduced_by(parse("every:txt")) == {"txt"}
    assert introduced_by(parse("rest:txt+img")) == {"img"}
    with pytest.raises(ValueError, match="no word of the plan gives the length of 'txt'"):
        ShardingSpec(attention={}, cut={"a.0": {"x": "rest:txt+img"}}, gather={"b": "img"})


@pytest.mark.parametrize(
    "changed",
    [
        {"cut": {"a.0": {"x": "img"}, "a.*": {"pe": "txt+img"}}},
        {"gather": {"b": "txt"}},
        {"gather": ({"b": "img"}, {"c": ("img", "txt")})},
        {"attention": {"a": "txt+img"}},
        {"attention": {"a": "img|txt"}},
        {"attention": {"a": {"attn": "img<-txt"}}},
        {"whole": {"c": {"x": "txt"}}},
        {"control": {"input": "txt"}},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_a_stream_whose_length_nothing_gives_is_refused(changed: dict) -> None:
    with pytest.raises(ValueError, match="no word of the plan gives the length of 'txt'"):
        ShardingSpec(**{"attention": {}, "cut": {"a.0": {"x": "img"}}, "gather": {"b": "img"}} | changed)


def test_first_tokens_of_which_nothing_says_how_many_are_refused() -> None:
    words = {"x": "img", "y": "txt"}
    with pytest.raises(ValueError, match="no word of the plan gives the length of 'index:txt'"):
        ShardingSpec(attention={"a": "img+index:txt"}, cut={"a.0": words}, gather={"b": "img"})
    ShardingSpec(
        attention={"a": "img+index:txt"}, cut={"a.0": words, "a.*": {"crop": "index:txt"}}, gather={"b": "img"}
    )


def test_control_is_for_one_stream() -> None:
    with pytest.raises(ValueError, match=r"control\['input'\] is 'img@2'; use the name of one stream"):
        ShardingSpec(attention={}, cut={"a.0": {"x": "img"}}, gather={"b": "img"}, control={"input": "img@2"})


def of_comfyui(path: str, *bases: type, **methods: object) -> type:
    """A class as if ComfyUI had it at a dotted path."""
    module, name = path.rsplit(".", 1)
    return type(name, bases, {"__module__": module, **methods})


def forward(self: object) -> None:
    """Stands for a method."""


WAN = of_comfyui("comfy.ldm.wan.model.WanModel", forward_orig=forward, forward=forward)


def test_a_class_has_the_plan_of_its_path() -> None:
    assert spec_of(WAN) is SPECS["comfy.ldm.wan.model.WanModel"]
    assert spec_of(of_comfyui("comfy.ldm.flux.model.Flux")).control == {"input": "img", "output": "img"}


def test_a_subclass_has_the_plan_of_its_base() -> None:
    assert spec_of(of_comfyui("pack.Mine", WAN, name_of_it=forward, __init__=forward)) is spec_of(WAN)


def test_a_subclass_with_a_plan_has_its_own() -> None:
    vace = of_comfyui("comfy.ldm.wan.model.VaceWanModel", WAN, forward_orig=forward)
    assert spec_of(vace) is SPECS["comfy.ldm.wan.model.VaceWanModel"]


def test_a_subclass_that_changes_what_a_plan_was_made_for_is_refused() -> None:
    other = of_comfyui("comfy.ldm.wan.model_other.OtherWanModel", WAN, forward_orig=forward)
    for each in (other, of_comfyui("pack.Mine", other)):
        with pytest.raises(
            ValueError, match="has no plan .* changes 'forward_orig' of WanModel; use cfg parallel, data"
        ):
            spec_of(each)


@pytest.mark.parametrize(("path", "said"), WITHOUT.items(), ids=list(WITHOUT))
def test_a_class_without_a_plan_is_refused_by_its_name_with_its_own_reason(path: str, said: tuple[str, str]) -> None:
    name = path.rpartition(".")[2]
    for each in (of_comfyui(path), of_comfyui("pack.Mine", of_comfyui(path), forward=forward)):
        with pytest.raises(ValueError) as error:
            spec_of(each)
        assert str(error.value) == f"{each.__name__} has no plan to share its tokens: {said[0]}; {said[1]}"
        assert (not_sampled(each) != "") == ("Load Diffusion Model" in said[1])
    assert not_sampled(of_comfyui(path)) in ("", f"{name}: {said[0]}; {said[1]}")


def test_a_class_of_which_nothing_is_known_is_told_what_needs_no_plan() -> None:
    said = "New has no plan to share its tokens; use cfg parallel, data parallel or sharded weights, which need none"
    with pytest.raises(ValueError, match=said):
        spec_of(of_comfyui("comfy.ldm.new.model.New"))
    assert not_sampled(WAN) == ""


def test_no_class_has_a_plan_and_a_reason_to_have_none() -> None:
    assert set(SPECS) & set(WITHOUT) == set()


def test_plans_are_read_without_torch_and_comfyui() -> None:
    program = "import sys, parallel_runtime.models.specs; print(sorted({'torch', 'comfy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
