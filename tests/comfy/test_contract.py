"""The host contract is whole, this ComfyUI fulfils it, and each line that is missing costs its feature alone.

Owns: the list against the pack's own source, every line deleted in turn. Does not own: a server whose ComfyUI lacks
something (test_changed_comfyui.py), nor plans that do not fit (families/test_self_proof.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest

from host.fetch import comfyui_path
from host.server import PACK_ROOT
from parallel_runtime.models.hosted.contract import FEATURES, LINES, WHERE_THERE, Line
from parallel_runtime.models.hosted.contract_check import NOTHING, find, look

from .contract_uses import files, uses_in

# What Python's own types and aiohttp's bring, which no line has to name.
PYTHONS = (
    "__file__",
    "__name__",
    "get",
    "values",
    "items",
    "append",
    "create_task",
    "on_startup",
    "post",
    "removeprefix",
)
PYTHONS += ("copy",)  # of each class of ControlNets its own
PYTHONS += ("advice", "decision", "decision_for", "delta_set", "plan", "side_branch", "under")  # of a RemotePatcher
PYTHONS += ("stock", "for_device")  # of what this pack puts in place of the attention function
PROCESS_S = 900


def loaded(*each: str) -> list[dict[str, Any]]:
    """What came of the pack with nothing deleted; with "each" then without each line in turn."""
    program = str(PACK_ROOT / "tests" / "comfy" / "contract_deleted.py")
    environment = os.environ | {"PYTHONPATH": ""}
    asked = [sys.executable, "-I", program, str(comfyui_path()), str(PACK_ROOT), *each]
    ended = subprocess.run(asked, capture_output=True, text=True, timeout=PROCESS_S, env=environment, check=False)
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines() if line.startswith('{"')]


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


def test_a_name_that_the_contract_lacks_is_found(tmp_path: Any) -> None:
    """The same look at a file that uses more."""
    file = tmp_path / "more.py"
    file.write_text(
        "import comfy.samplers\nfrom .comfyui import comfy_nodes, ModelPatcher\nfrom comfy.sd import VAE\n"
        "comfy.samplers.new_name()\ncomfy_nodes.KSampler\nModelPatcher.other\nVAE.tiled\n"
        "kept = comfy.samplers.KSAMPLER\nkept.more\n"
        "from .comfyui import ControlBase, get_executing_context, get_progress_state\nfrom .writers import executing\n"
        "def asks(control: ControlBase | None):\n    now, prompt = executing(), get_progress_state().dynprompt\n"
        "    prompt.later_node(now.later_id)\n    get_executing_context().later_prompt\n    control.later\n"
        "    ModelPatcher(control).later_patch()\n"
    )
    found = [use for use, _ in uses_in(file) if not is_named(use)]
    assert sorted(found) == [
        "comfy.controlnet.ControlBase.later",
        "comfy.model_patcher.ModelPatcher.later_patch",
        "comfy.model_patcher.ModelPatcher.other",
        "comfy.samplers.KSAMPLER.more",
        "comfy.samplers.new_name",
        "comfy.sd.VAE.tiled",
        "comfy_execution.graph.DynamicPrompt.later_node",
        "comfy_execution.utils.ExecutionContext.later_id",
        "comfy_execution.utils.ExecutionContext.later_prompt",
        "nodes.KSampler",
    ]


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
    module.function, module.known = _Unlooked(), lambda a: a
    monkeypatch.setitem(sys.modules, "looked_at", module)
    lines = [
        Line(feature="parallel", since="", name=f"looked_at.{name}", arguments=("a",)) for name in ("function", "known")
    ]
    assert [line.name for line in look(lines)] == ["looked_at.function"]


def test_no_line_is_there_twice_and_every_feature_has_some() -> None:
    assert len({(line.feature, line.text) for line in LINES}) == len(LINES)
    assert {line.feature for line in LINES} == FEATURES.keys()


def test_this_comfyui_fulfils_every_line() -> None:
    (whole,) = loaded()
    assert whole["line"] is None and "error" not in whole, whole
    assert (whole["off"], whole["said"]) == ({}, []) and len(whole["ids"]) == 11


@pytest.mark.slow
@pytest.mark.timeout(PROCESS_S + 20)
def test_each_line_that_is_missing_turns_off_its_features_and_the_pack_is_there() -> None:
    whole, *tried = loaded("each")
    used = [each for each in tried if each["line"] in WHERE_THERE]
    assert {"comfyui_version.__version__", "comfy.controlnet.ControlLora"} <= {each["line"] for each in used}
    assert [each for each in used if each.get("off") != {} or each["ids"] != whole["ids"] or each["said"]] == []
    tried = [each for each in tried if each not in used]
    lines = [*LINES, *(line for line in LINES if line.arguments)]  # the latter once more with others alone
    assert [each["line"] for each in tried] == [line.text for line in lines]
    wrong = []
    for line, found in zip(lines, tried, strict=True):
        sentence = found.get("off", {}).get(line.feature, "")
        owner = line.name if line.attribute else line.name.rpartition(".")[0]  # of which more than one may be missing
        last = line.attribute or line.name.rpartition(".")[2]
        good = sentence.startswith("ComfyUI ") and (f"`{owner}." in sentence or f".{last}` and " in sentence)
        good = good and FEATURES[line.feature].title in sentence
        good = good and "is off" in sentence and "update" in sentence
        good = good and "error" not in found and found["ids"] == whole["ids"]
        good = good and any(sentence in text for text in found["log"])
        good = good and found["said"] == ([sentence] if line.feature == "nodes" else found["said"])
        good = good and "Traceback" not in "".join(found["log"])
        if not good:
            wrong.append(found)
    assert wrong == [], f"{len(wrong)} lines: {json.dumps(wrong, indent=1)}"
