"""The host contract is whole, this ComfyUI fulfils it, and each line that is missing costs its feature alone."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from host.server import PACK_ROOT
from parallel_runtime.models.hosted.contract import FEATURES, LINES, WHERE_THERE, Line
from parallel_runtime.models.hosted.contract_check import NOTHING, find, look

from .contract_uses import files, uses_in

# What Python's own types and aiohttp's bring, which no line has to name.
PYTHONS = ("__file__", "__name__", "get", "values", "items", "append", "create_task", "on_startup", "post")
PYTHONS += ("removeprefix", "copy")  # the last of each class of ControlNets its own
PYTHONS += ("advice", "decision", "decision_for", "delta_set", "plan", "side_branch", "under")  # of a RemotePatcher
PYTHONS += ("stock", "for_device")  # of what this pack puts in place of the attention function


def is_named(use: str) -> bool:
    """Whether the contract has a line for what the pack uses: the same, or more of it where that is a module's name."""
    parts = use.split(".")
    while parts[-1] in PYTHONS:
        parts.pop()
    use = ".".join(parts)
    owner, _, last = use.rpartition(".")
    lines = {(line.name, line.attribute) for line in LINES} | {(name, "") for name in WHERE_THERE}
    return (use, "") in lines or (owner, last) in lines or any(f"{name}.".startswith(f"{use}.") for name, _ in lines)


def test_every_name_of_comfyui_that_the_pack_uses_is_in_the_contract() -> None:
    uses = [(use, path, number) for path in files() for use, number in uses_in(path)]
    assert len(uses) > 200
    missing = [f"{path.relative_to(PACK_ROOT)}:{number}: {use}" for use, path, number in uses if not is_named(use)]
    assert missing == [], "add lines to parallel_runtime/models/hosted/contract.py:\n" + "\n".join(missing)


def test_a_module_that_cannot_be_imported_is_missing(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one whose own package has moved a name: what it has is off, and the pack is there."""
    (tmp_path / "made_for_another.py").write_text("KEPT = 1\nfrom json import gone\n")
    (tmp_path / "whole_module.py").write_text("KEPT = 1\n")
    lazy = "KEPT = 1\ndef __getattr__(name):\n    raise ImportError(name)\n"
    (tmp_path / "lazy_module.py").write_text(lazy)
    for error in ("RuntimeError", "OSError", "NameError"):
        (tmp_path / f"raises_{error}.py").write_text(f"KEPT = 1\nraise {error}\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert find("made_for_another.KEPT") is NOTHING
    assert [find(f"raises_{error}.KEPT") for error in ("RuntimeError", "OSError", "NameError")] == [NOTHING] * 3
    assert find("whole_module.KEPT") == find("lazy_module.KEPT") == 1
    assert find("lazy_module.gone") is find("lazy_module.gone.more") is NOTHING


class _Unlooked:
    """A function's stand-in of somebody's, at which nobody can look."""

    def __getattr__(self, name: str) -> object:
        raise RuntimeError(name)


def test_what_cannot_be_looked_at_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("looked_at")
    module.function, module.known, module.named = _Unlooked(), lambda a: a, lambda *, a, b=0: (a, b)
    monkeypatch.setitem(sys.modules, "looked_at", module)
    taken = {"function": "a", "known": "a", "named": "ab"}
    lines = [Line(feature="parallel", name=f"looked_at.{name}", arguments=(*names,)) for name, names in taken.items()]
    assert [line.name for line in look(lines)] == ["looked_at.function"]


def test_no_line_is_there_twice_and_every_feature_has_some() -> None:
    assert len({(line.feature, line.text) for line in LINES}) == len(LINES)
    assert {line.feature for line in LINES} == FEATURES.keys()


@pytest.mark.slow
def test_each_line_that_is_missing_turns_off_its_features_and_the_pack_is_there(in_comfyui) -> None:
    """Each line is missed by itself; the pack is loaded without all lines of a feature, which are guarded as one."""
    printed = in_comfyui(Path(__file__).with_name("contract_deleted.py"), str(PACK_ROOT))
    found = [json.loads(line) for line in printed if line.startswith('{"')]
    looks = {(each["feature"], each["line"], each["arguments"]): each["off"] for each in found if "line" in each}
    loads = {(each["group"], each["arguments"]): each for each in found if "group" in each}
    used = {text: looks.pop(("", text, False)) for feature, text, _ in list(looks) if not feature}
    assert {"comfyui_version.__version__", "comfy.controlnet.ControlLora"} <= used.keys() <= set(WHERE_THERE)
    assert [text for text, off in used.items() if off] == []
    expected = {(line.feature, line.text, only): line for line in LINES for only in {False, bool(line.arguments)}}
    assert looks.keys() == expected.keys()
    wrong = [(*each, looks[each]) for each, line in expected.items() if not names(looks[each].get(each[0], ""), line)]
    assert wrong == []
    whole = loads.pop(("", False))
    assert (whole.get("off"), whole["said"]) == ({}, []) and len(whole["ids"]) == 11, "nothing was deleted"
    assert loads.pop(("used where there", False)).get("off") == {}
    assert loads.keys() == {(feature, only) for feature, _, only in expected}
    for (feature, _), load in loads.items():
        assert "error" not in load and load["ids"] == whole["ids"], load
        assert load["said"] == ([load["off"][feature]] if "nodes" in load["off"] else []), load
        assert any(load["off"][feature] in text for text in load["log"]), load
        assert "Traceback" not in "".join(load["log"]), load


def names(sentence: str, line: Line) -> bool:
    """Whether a sentence says what is missing of the line, what is off, and what to do."""
    owner = line.name if line.attribute else line.name.rpartition(".")[0]  # of which more than one may be missing
    last = line.attribute or line.name.rpartition(".")[2]
    missing = (f"`{owner}.", f".{last}` and ", f"`{owner}` that takes no {last}")
    said = sentence.startswith("ComfyUI ") and any(text in sentence for text in missing)
    return said and all(text in sentence for text in (FEATURES[line.feature].title, "is off", "update"))
