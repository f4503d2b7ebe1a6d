"""Words of plans, plans, and which class has which: pure data, without torch and ComfyUI.

Does not own: what a word means (test_cuts.py), a plan against ComfyUI's class (test_hosted_parity.py).
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from parallel_runtime.models.specs import SPECS, WITHOUT, ShardingSpec, not_sampled, spec_of
from parallel_runtime.models.specs.spec import Keeps
from parallel_runtime.models.specs.words import (
    Attention,
    Each,
    Every,
    Frames,
    Grid,
    Guides,
    Index,
    Last,
    Order,
    Ranges,
    StreamTokens,
    Tokens,
    Word,
    WordText,
    introduced_by,
    parse,
    parse_attention,
    streams_in,
)

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
    ["", "vid<-", "a<-b<-c", "-txt+img", "txt@2", "Local", "?", "img|local|txt", "a+b within w", "x within", "x again"]
    + ["img<-txt+kept:img", "kept:txt+img", "kept:img<-txt"],
)
def test_a_word_of_attention_that_is_none_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ValueError, match="says nothing of attention") as error:
        ShardingSpec(attention={"blocks": {"attn": text}}, cut={"a.0": {"x": "img"}}, gather={"b": "img"})
    assert repr(text) in str(error.value)


IMG, TXT, HELD = StreamTokens("img"), StreamTokens("txt"), StreamTokens("txt", held=True)
# A text; its word; the streams that it names; those whose length its value gives.
WORDS: list[tuple[WordText, Word, set[str], set[str]]] = [
    ("img", Tokens((IMG,)), {"img"}, {"img"}),
    ("img@0", Tokens((IMG,), 0), {"img"}, {"img"}),
    ("img@2", Tokens((IMG,), 2), {"img"}, {"img"}),
    ("heads:img", Tokens((IMG,), heads=True), {"img"}, set()),
    ("txt+img@3", Tokens((TXT, IMG), 3), {"txt", "img"}, set()),
    ("-txt", Tokens((HELD,)), {"txt"}, set()),
    ("-txt+img", Tokens((HELD, IMG)), {"txt", "img"}, set()),
    ("img+*", Tokens((IMG,), rest=True), {"img"}, set()),
    ("txt+img+*@2", Tokens((TXT, IMG), 2, rest=True), {"txt", "img"}, set()),
    ("rest:txt+img", Tokens((TXT, IMG), opens=True), {"txt", "img"}, {"img"}),
    ("order:txt+img", Order((TXT, IMG)), {"txt", "img"}, set()),
    ("frames:img", Frames("img"), {"img"}, set()),
    ("frames4:img", Frames("img", 4), {"img"}, set()),
    ("grid", Grid(1), {"grid"}, {"grid"}),
    ("grid@2", Grid(2), {"grid"}, {"grid"}),
    ("flat:grid@0", Grid(0, flat=True), {"grid"}, set()),
    ("ranges:-txt+img", Ranges((HELD, IMG)), {"txt", "img"}, set()),
    ("guides:img", Guides("img"), {"img"}, set()),
    ("index:img", Index("img"), {"img"}, set()),
    ("last:img", Last("img"), {"img"}, set()),
    ("every:txt", Every("txt"), {"txt"}, {"txt"}),
    (("img", "", "txt+img"), Each((Tokens((IMG,)), None, Tokens((TXT, IMG)))), {"txt", "img"}, {"img"}),
]


@pytest.mark.parametrize(("text", "word", "names", "gives"), WORDS, ids=[str(text) for text, *_ in WORDS])
def test_a_text_is_a_word(text: WordText, word: Word, names: set[str], gives: set[str]) -> None:
    assert parse(text) == word and streams_in(word) == names and introduced_by(word) == gives


@pytest.mark.parametrize(
    ("text", "attention", "names"),
    [
        ("local", Attention(local=True), set()),
        ("frames", Attention(("grid",), ("grid",), frames=True), {"grid"}),
        ("frames again", Attention(("grid",), ("grid",), frames=True, again=True), {"grid"}),
        ("img within reach", Attention(("img",), ("img",), within="reach"), {"img"}),
        ("txt+img", Attention(("txt", "img"), ("txt", "img")), {"txt", "img"}),
        ("vid<-aud+txt", Attention(("vid",), ("aud", "txt")), {"vid", "aud", "txt"}),
        ("img<-kept:txt+img", Attention(("img",), ("kept:txt", "img")), {"img", "kept:txt"}),
        ("img+index:txt", Attention(("img", "index:txt"), ("img", "index:txt")), {"img", "index:txt"}),
        (
            "a<-b|c|local",
            Attention(("a",), ("b",), otherwise=Attention(("c",), ("c",), otherwise=Attention(local=True))),
            {"a", "b", "c"},
        ),
    ],
)
def test_a_text_says_what_attention_is_over(text: str, attention: Attention, names: set[str]) -> None:
    assert parse_attention(text) == attention and streams_in(attention) == names


def test_what_stages_hand_on_is_said_by_the_words_or_refused() -> None:
    given: dict = {"cut": {"a.0": {"x": "txt"}, "b.0": {"x": "img", "y": "txt"}, "b.*": {"pe": "img"}}}
    given |= {"attention": {"a": "txt", "b": {"attn": "img", "cross": "local"}}}
    before, together = {"a.-1": "txt", "b.-1": "img"}, {"head": "img"}
    one = ShardingSpec(**given, gather=before, hands={"b": ("x", "y")})
    assert (one.before_stages, one.staged, one.streams_before) == (("a",), ("b",), {"txt"})
    assert (one.handed_on("a"), one.handed_on("b"), one.one_stage, one.unchained) == ("x", ("x", "y"), "", "")
    assert one.gathers == (before,) and one.attention_of("a") == {"": parse_attention("txt")}
    assert one.attention_of("b") == {"attn": parse_attention("img"), "cross": parse_attention("local")}
    several = ShardingSpec(**given, gather=(before, together))
    assert several.gathers == (before, together) and several.before_stages == () and several.streams_before == set()
    unsaid = "its plan does not say what blocks of a hand on"
    assert several.unchained == several.one_stage == unsaid
    with pytest.raises(ValueError, match=unsaid):
        several.handed_on("b")
    whole = ShardingSpec(**given, gather=before, hands={"b": "x"}, whole={"b.1": {"x": "img"}})
    assert whole.one_stage == "b.1 needs all tokens between blocks, and a stage has those of a patch"
    assert whole.unchained == ""
    why = ShardingSpec(**given, gather=before, hands={"b": "x"}, whole={"b.1": {"x": "img"}}, unstaged="for a reason")
    assert why.one_stage == why.unchained == "for a reason"
    alone = ShardingSpec(attention={"b": "img"}, cut={"b.0": {"x": "img"}}, gather={"head": "img"})
    assert alone.handed_on("b") == "x" and alone.methods_of("b") == ("forward",)
    called = {"b.*:two": {"x": "img"}, "b.0:one": {"x": "img"}, "b.1:two": {"x": "img"}, "bb.0:no": {"x": "img"}}
    assert ShardingSpec(attention={}, cut=called, gather={"h": "img"}).methods_of("b") == ("two", "one")


def test_keys_that_were_kept_have_a_length_where_a_class_keeps_some() -> None:
    given: dict = {
        "attention": {"a": "img<-kept:txt+img"},
        "cut": {"a.0": {"x": "img", "y": "txt"}},
        "gather": {"b": "img"},
    }
    with pytest.raises(ValueError, match="no word of the plan gives the length of 'kept:txt'"):
        ShardingSpec(**given)
    keeps = Keeps(reset="r", decide="d", patcher="p", option="o")
    assert ShardingSpec(**given, keeps=keeps).keeps is keeps


@pytest.mark.parametrize("text", ["img@2", "txt+img", "index:img"])
def test_control_names_one_stream(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"control['input'] is {text!r}; use the name of one stream")):
        ShardingSpec(attention={}, cut={"a.0": {"x": "img", "y": "txt"}}, gather={"b": "img"}, control={"input": text})


@pytest.mark.parametrize(
    "changed",
    [
        {"cut": {"a.0": {"x": "img"}, "a.*": {"pe": "txt+img"}}},
        {"cut": {"a.0": {"x": "rest:txt+img"}}},
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


def of_comfyui(path: str, *bases: type, **methods: object) -> type:
    """A class as if ComfyUI had it at a dotted path."""
    module, name = path.rsplit(".", 1)
    return type(name, bases, {"__module__": module, **methods})


def forward(self: object) -> None:
    """Stands for a method."""


WAN = of_comfyui("comfy.ldm.wan.model.WanModel", forward_orig=forward, forward=forward)


def test_a_class_has_the_plan_of_its_path_and_a_subclass_that_of_its_base_or_its_own() -> None:
    assert spec_of(WAN) is SPECS["comfy.ldm.wan.model.WanModel"]
    assert spec_of(of_comfyui("comfy.ldm.flux.model.Flux")).control == {"input": "img", "output": "img"}
    assert spec_of(of_comfyui("pack.Mine", WAN, name_of_it=forward, __init__=forward)) is spec_of(WAN)
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
