"""Counts that an earlier process kept: the same model, found for the same file, sources and options alone."""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from parallel_runtime.checkpoint import ComfyUI
from parallel_runtime.planner import counting, kept_counts
from parallel_runtime.planner.comfyui_process import NoAnswerError
from parallel_runtime.planner.counting import Counted, Counts, usual_counted
from parallel_runtime.planner.kept_counts import KeptCounts, sources_of

USUAL = usual_counted()
FILLED = replace(USUAL, model=replace(USUAL.model, filling=(USUAL.model.whole, USUAL.model.shared)))
FILLED = replace(FILLED, model=replace(FILLED.model, kept_bytes={"gpu": (1.0, 2.5)}, staged_blocks=7))


@pytest.fixture
def comfyui(tmp_path: Path) -> ComfyUI:
    (tmp_path / "ComfyUI" / "comfy" / "ldm").mkdir(parents=True)
    for name in ("main.py", "comfy/model_base.py", "comfy/ldm/model.py"):
        (tmp_path / "ComfyUI" / name).write_text("1")
    return ComfyUI(str(tmp_path / "ComfyUI"), ("--fast",))


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "model.safetensors").write_text("weights")
    return str(tmp_path / "model.safetensors")


class Process:
    """What counts: FILLED for any dtype but "torn", of which it says no, and "killed", which gives no answer."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, path: str, dtype: str, *_: object) -> Counted:
        self.asked += 1
        if dtype == "torn":
            raise ValueError("no model")
        if dtype == "killed":
            raise NoAnswerError("its process ended")
        model = replace(FILLED.model, name=os.path.basename(path))
        return replace(FILLED, model=model)


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[Process]:
    made = Process()
    monkeypatch.setattr(counting, "_count", made)
    yield made
    sources_of.cache_clear()


def later(tmp_path: Path) -> Counts:
    """What a ComfyUI has that was started now."""
    sources_of.cache_clear()
    return Counts(KeptCounts(tmp_path / "deep" / "counts.json"))


def test_a_later_process_finds_what_was_counted_and_asks_again_what_could_not_be(
    tmp_path: Path, file: str, comfyui: ComfyUI, process: Process
) -> None:
    first = later(tmp_path).of(file, "float32", comfyui, found="")
    assert later(tmp_path).of(file, "float32", comfyui, found="") == first and process.asked == 1
    assert first.model.name == "model.safetensors" and first.model.filling is not None
    for asked, dtype in ((2, "torn"), (3, "torn"), (4, "killed"), (5, "killed")):  # what was lacking may be there
        with pytest.raises(ValueError, match="no model|its process ended"):
            later(tmp_path).of(file, dtype, comfyui, found="")
        assert process.asked == asked
    for asked in (6, 7):  # the user's plans may be others then
        later(tmp_path).of(file, "float32", comfyui)
        assert process.asked == asked
    Counts().of(file, "float32", comfyui, found="")
    assert process.asked == 8, "one that keeps nothing"
    assert os.listdir(tmp_path / "deep") == ["counts.json"]


def test_what_cannot_be_told_of_sources_is_counted_and_not_kept(
    tmp_path: Path, file: str, comfyui: ComfyUI, process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As beside the link of an editor that holds a file, or with a torch that pip did not install."""
    (link := Path(comfyui.path, "comfy", ".#model_base.py")).symlink_to("nobody@nowhere.1")
    for asked in (1, 2):
        assert later(tmp_path).of(file, "float32", comfyui, found="").model.filling and process.asked == asked
    link.unlink()

    def none(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(kept_counts, "version", none)
    assert later(tmp_path).of(file, "float32", comfyui, found="").model.filling and process.asked == 3
    assert not (tmp_path / "deep").exists()


def test_whatever_a_count_depends_on_has_it_counted_again(
    tmp_path: Path, file: str, comfyui: ComfyUI, process: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual: dict[str, Any] = {"dtype": "float32", "comfyui": comfyui, "found": ""}
    other: tuple[dict[str, Any], ...] = (
        *({"dtype": "bfloat16"}, {"found": "a plan"}, {"width": 64}),
        {"comfyui": replace(comfyui, options=())},
    )
    later(tmp_path).of(file, **usual)
    for number, each in enumerate(other, 2):
        for _ in range(2):
            later(tmp_path).of(file, **{**usual, **each})
            assert process.asked == number, each
    for number, name in enumerate(("main.py", "comfy/model_base.py", "comfy/ldm/model.py"), 6):
        Path(comfyui.path, name).write_text("an update")
        later(tmp_path).of(file, **usual)
        assert process.asked == number, name
    monkeypatch.setattr(kept_counts, "version", lambda name: "99")
    later(tmp_path).of(file, **usual)
    assert process.asked == 9, "another torch"
    monkeypatch.setattr(kept_counts, "PACK", Path(comfyui.path))
    later(tmp_path).of(file, **usual)
    assert process.asked == 10, "another version of the pack"
    Path(file).write_text("other weights")
    later(tmp_path).of(file, **usual)
    later(tmp_path).of(file, **usual)
    assert process.asked == 11


@pytest.mark.parametrize("damage", ["no counts", "half of them", "a number for a text"])
def test_a_model_whose_kept_entry_cannot_be_read_is_counted_again(
    tmp_path: Path, file: str, comfyui: ComfyUI, process: Process, damage: str
) -> None:
    """Damaged files are tests/test_proof.py's: all stores keep their entries alike (user_files.py)."""
    later(tmp_path).of(file, "float32", comfyui, found="")
    path = tmp_path / "deep" / "counts.json"
    content = json.loads(path.read_text())
    (entry,) = content["counts"].values()
    if damage == "no counts":
        entry["counted"] = 7
    elif damage == "half of them":
        del entry["counted"]["shared"]
    else:
        entry["counted"]["whole"] = 5
    path.write_text(json.dumps(content))
    for _ in range(2):
        assert later(tmp_path).of(file, "float32", comfyui, found="").model.filling
        assert process.asked == 2


def test_where_nothing_can_be_written_the_log_says_so(
    tmp_path: Path, file: str, comfyui: ComfyUI, process: Process, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "deep").write_text("a file in the folder's place")
    assert later(tmp_path).of(file, "float32", comfyui, found="").model.filling
    assert "counts.json cannot be written (" in caplog.text
    assert "so models are counted again; set XDG_CACHE_HOME" in caplog.text
