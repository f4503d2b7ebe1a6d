"""`find-plan` finds, proves and keeps the plan of a file's class; what is kept holds for one class of one ComfyUI."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from descriptors import open_descriptors
from rounding import ROUNDING

from host.fetch import comfyui_path
from host.tiny_hosted import write_tiny
from parallel_runtime.checkpoint import ComfyUI
from parallel_runtime.cli import find_plan
from parallel_runtime.models.specs import SPECS, WITHOUT, ShardingSpec, find_spec, found, spec_of
from parallel_runtime.models.specs.found import (
    Found,
    FoundKey,
    FoundSpecs,
    class_source,
    found_spec_of,
    found_specs,
    give_found,
    key_of,
    none_found,
    plan_in,
    told_by,
)
from parallel_runtime.models.specs.written import from_data, to_data
from parallel_runtime.planner import comfyui_process
from parallel_runtime.planner.comfyui_process import ComfyUIProcess, NoAnswerError, NotStartedError
from parallel_runtime.planner.finding import find_plan as find_plan_of
from tools.ship_plans import ship

FLUX, WAN = "comfy.ldm.flux.model.Flux", "comfy.ldm.wan.model.WanModel"
KEY = FoundKey(model_class=FLUX, source="1f", comfyui="0.30.0")


@pytest.mark.slow
def test_the_plan_of_a_file_is_found_proven_printed_and_kept(
    tmp_path: Path, command: Callable[..., subprocess.CompletedProcess[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_tiny(tmp_path / "model.safetensors")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    done = command("find-plan", str(file), "--comfyui", str(comfyui_path()), "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["class"], report["cuts"], report["refused"]) == (WAN, "cut once", "")
    assert report["error"] <= ROUNDING < 1e-3 < report["control"] and "references" in report["with"]
    assert report["plan"]["cut"] == {"blocks.0": {"x": "img"}, "blocks.*": {"freqs": "img"}}
    assert report["plan"]["gather"] == {"head": "img"}
    key = FoundKey(model_class=WAN, **{name: report[name] for name in ("source", "comfyui", "kind")})
    kept = FoundSpecs(Path(report["kept"])).load(key)
    assert kept is not None and kept.spec == from_data(report["plan"])
    said = find_plan.describe(report)
    assert "cross_attn" in said and said.splitlines()[-1].startswith("found, proven: cut once")


def test_a_kept_plan_is_of_one_source_and_damage_is_not_believed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = FoundSpecs(tmp_path / "found_plans.json")
    spec = SPECS[FLUX]
    assert kept.load(KEY) is None
    assert kept.save(KEY, spec, cuts="cut once", errors={"error": 1e-7, "control": 0.1})
    assert kept.load(KEY) == Found(spec=spec, told="cut once, relative error 1.0e-07, without exchange 1.0e-01")
    for other in (replace(KEY, source="2f"), replace(KEY, comfyui="0.31.0")):
        assert kept.load(other) is None and kept.of_others(replace(other, kind="5b")) is None
    content = json.loads(kept.path.read_text())
    content["plans"][KEY.digest]["plan"]["cut"]["double_blocks.0"]["img"] = "img@@"
    kept.path.write_text(json.dumps(content))
    assert kept.load(KEY) is None
    assert "is not used" in caplog.text
    content["plans"][KEY.digest]["plan"] = {**to_data(spec), "gather": []}  # no rank could read it
    kept.path.write_text(json.dumps(content))
    assert kept.load(KEY) is None
    kept.path.write_text("{")
    assert kept.load(KEY) is None


def test_why_there_is_none_holds_for_the_finder_that_looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = FoundSpecs(tmp_path / "found_plans.json")
    assert kept.save_refusal(KEY, "blocks.0 mixes tokens")
    assert kept.load(KEY) == Found(why="no plan was found: blocks.0 mixes tokens")
    monkeypatch.setattr(found, "finder_source", lambda: "another")
    assert kept.load(KEY) is None


def test_the_finder_is_all_that_looks_and_proves() -> None:
    finder = Path(found.__file__).parents[2] / "worker" / "finding.py"
    beside = re.findall(r"^from \.(\w+) import", finder.read_text(), re.MULTILINE)
    assert {f"worker/{each}.py" for each in ("finding", *beside)} <= {*found.FINDER}


def test_a_class_without_a_plan_takes_the_one_that_was_found_for_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A class of a made-up ComfyUI: its plan holds until its file changes, and never for one that people wrote."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "comfy" / "ldm" / "new" / "model.py"
    (tmp_path / "comfy" / "ldm" / "modules").mkdir(parents=True)
    file.parent.mkdir()
    for each in ("model_base.py", "ldm/modules/attention.py", "ldm/new/model.py"):
        (tmp_path / "comfy" / each).write_text("")
    (tmp_path / "comfyui_version.py").write_text('__version__ = "0.99.1"\n')
    (file.parent / ".#model.py").symlink_to("somebody@here.1")  # Emacs has unsaved changes
    module = types.ModuleType("comfy.ldm.new.model")
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    kind = type("New", (), {"__module__": module.__name__})
    model = kind()
    with pytest.raises(ValueError, match="New has no plan"):
        spec_of(model)
    key, spec = key_of(kind), SPECS[FLUX]
    assert key is not None and key.comfyui == "0.99.1" and found_spec_of(kind) is None
    assert found_specs().save(key, spec, cuts="cut once", errors={"error": 0.0, "control": 1.0})
    give_found(model, found_spec_of(kind))
    assert spec_of(model) == spec and find_spec(kind()) is None  # it is the model's, not the class's
    give_found(model, none_found("blocks.0 mixes tokens"))
    with pytest.raises(ValueError, match="no plan was found: blocks.0 mixes tokens; use cfg parallel"):
        spec_of(model)
    written = type("Flux", (), {"__module__": "comfy.ldm.flux.model"})()
    give_found(written, Found(spec=SPECS[WAN]))
    assert spec_of(written) == spec
    monkeypatch.setattr(found, "SHIPPED", tmp_path / "shipped")
    entry = {"from": "a test", "cuts": "cut in each block", "errors": {"error": 0.0, "control": 2.0}}
    sources = {class_source(file): entry | {"plan": to_data(SPECS[WAN])}, "1f": entry}
    ship(tmp_path / "shipped", key.model_class, "1f", entry)
    assert found_spec_of(kind) == Found(spec=spec, told=told_by("cut once", {"error": 0.0, "control": 1.0}))
    for source, each in sources.items():  # a file has one for each source of the class
        shipped = ship(tmp_path / "shipped", key.model_class, source, each)
    assert found_spec_of(kind) == Found(spec=SPECS[WAN], told=told_by("cut in each block", entry["errors"]))
    file.write_text("# another one")
    assert found_spec_of(kind) is None
    ship(tmp_path / "shipped", key.model_class, class_source(file), entry)  # it has no plan
    assert found_spec_of(kind) is None
    shipped.write_text("{")
    assert found_spec_of(kind) is None


def test_plans_come_in_their_order_and_without_those_that_a_proof_refused_for_such_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shipped, found with such a file, found with another; a reason for such files is no reason for others."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(found, "key_of", lambda _, kind="": replace(KEY, kind=kind))
    shipped, own, others = (Found(spec=SPECS[each], told="") for each in sorted(SPECS)[:3])
    monkeypatch.setattr(found, "shipped_spec_of", lambda _: shipped)
    kept, errors = found_specs(), {"error": 0.0, "control": 1.0}

    def known(kind: str = "5b") -> ShardingSpec | None:
        said = found_spec_of(type(None), kind)
        return None if said is None else said.spec

    old = {"cuts": "cut once", "errors": errors, "plan": to_data(others.spec)}  # of before, without a kind
    key = {name: value for name, value in asdict(KEY).items() if name != "kind"}
    kept.path.parent.mkdir()
    kept.path.write_text(json.dumps({"version": 1, "plans": {"1f": {"key": key, **old}}}))
    assert known() == shipped.spec
    assert not kept.pass_over(replace(KEY, kind="5b"), shipped)  # it has none of its own yet
    assert kept.save(replace(KEY, kind="5b"), own.spec, cuts="cut once", errors=errors)
    unkept = replace(own, instead_of=(shipped.digest,))  # a folder that can be read alone
    assert found_spec_of(type(None), "5b", known=unkept).spec == own.spec
    assert known() == shipped.spec and kept.pass_over(replace(KEY, kind="5b"), shipped)
    assert (known(), known("14b")) == (own.spec, shipped.spec)
    shipped = None
    assert (known(), known("14b")) == (own.spec, own.spec)  # the last that was found
    assert kept.save_refusal(replace(KEY, kind="5b"), "blocks.0 mixes tokens")
    assert (known(), known("14b")) == (others.spec, others.spec)
    kept.path.unlink()
    assert kept.save_refusal(replace(KEY, kind="5b"), "blocks.0 mixes tokens")
    assert (found_spec_of(type(None), "5b"), known("14b")) == (none_found("blocks.0 mixes tokens"), None)
    assert found_spec_of(type(None), "14b") is None


def test_what_the_pack_ships_is_of_classes_that_nobody_wrote_a_plan_for() -> None:
    files = list(found.SHIPPED.glob("*.json"))
    assert files
    for file in files:
        for entry in json.loads(file.read_text())["plans"].values():
            known = plan_in(entry, file.stem, file)
            assert known is not None and known.spec is not None and to_data(known.spec) == entry["plan"]
            assert file.stem not in {*SPECS, *WITHOUT} and entry["from"] and entry["errors"]["error"] <= 1e-5


def looking() -> list[int]:
    """The processes of this one that look for plans."""
    return [
        int(pid)
        for task in Path("/proc/self/task").iterdir()
        for pid in (task / "children").read_text().split()
        if b"worker.finding" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> None:
    """What looks is stopped before it is asked anything: it cannot answer before a test has done its part."""
    popen = subprocess.Popen

    def stopped(*command: Any, **settings: Any) -> subprocess.Popen[str]:
        process = popen(*command, **settings)
        while not looking():  # one that is forked has its command line a moment later
            assert process.poll() is None
            time.sleep(0.001)
        os.kill(process.pid, signal.SIGSTOP)
        return process

    monkeypatch.setattr(subprocess, "Popen", stopped)


def end(_: float) -> None:
    for pid in looking():
        os.kill(pid, signal.SIGKILL)


def cancel(_: float) -> None:
    raise KeyboardInterrupt("cancelled")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit_s", "clock", "tick", "raised", "says"),
    [
        (0.3, 3, None, NoAnswerError, "it took more than 0.9 s"),
        (None, 3, end, NoAnswerError, "ended with status -9"),
        (300.0, 3, cancel, KeyboardInterrupt, "cancelled"),
    ],
    ids=["computes nothing", "ends", "cancelled"],
)
def test_what_looks_leaves_no_process_behind(
    limit_s: float | None,
    clock: float,
    tick: Callable[[float], None] | None,
    raised: type[BaseException],
    says: str,
    held: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(comfyui_process, "CLOCK", clock)
    with pytest.raises(raised, match=says):
        find_plan_of("nowhere.safetensors", ComfyUI(str(comfyui_path())), limit_s=limit_s, tick=tick)
    assert looking() == []


@pytest.mark.slow
def test_what_looks_for_too_long_leaves_no_process_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comfyui_process, "CLOCK", 1e6)
    with pytest.raises(NoAnswerError, match=r"it took more than 0\.01 s"):
        find_plan_of("nowhere.safetensors", ComfyUI(str(comfyui_path())), limit_s=0.01)
    assert looking() == []


ECHO = """
import json, sys, time
for line in sys.stdin:
    asked = json.loads(line)
    if asked["do"] == "end":
        sys.exit("one line\\nits last words")
    for each in asked["with"].get("lines", [{"answer": {}}]):
        print(json.dumps(each), flush=True)
time.sleep(0.5)
"""


def echoing(folder: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> ComfyUIProcess:
    """A process that runs this program."""
    (folder / "echo.py").write_text(program)
    monkeypatch.setattr(comfyui_process, "PACK_ROOT", folder)
    return ComfyUIProcess(ComfyUI("/comfy"), "cpu", program="echo")


@pytest.fixture
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ComfyUIProcess:
    """A process that says the lines that it is told to, and ends half a second late."""
    return echoing(tmp_path, monkeypatch, ECHO)


@pytest.mark.parametrize(("more", "ending_s", "status"), [("", 600.0, 0), ("time.sleep(600)", 0.05, -signal.SIGKILL)])
def test_a_process_has_ended_when_its_files_go(
    more: str, ending_s: float, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comfyui_process, "ENDING_S", ending_s)
    echo = echoing(tmp_path, monkeypatch, ECHO + more)
    assert echo.folder.is_dir()
    echo.close()
    assert echo._process.returncode == status and not echo.folder.exists()


def test_a_process_that_was_killed_before_a_question_is_named_and_its_files_go(echo: ComfyUIProcess) -> None:
    with echo as process:
        os.kill(process._process.pid, signal.SIGKILL)
        process._process.wait()
        with pytest.raises(NoAnswerError, match="ended with status -9"):
            process.ask("say")
    assert not echo.folder.exists()


def test_no_temporary_folder_is_a_reason_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(ValueError, match=r"^no temporary folder can be made \(No such file .*\); .* set TMPDIR"):
        ComfyUIProcess(ComfyUI("/comfy"), "cpu")


def test_no_room_for_a_process_is_a_reason_with_a_remedy_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planner goes on without a count, as with any other reason."""

    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(subprocess, "Popen", refused)
    before = open_descriptors()
    with pytest.raises(
        NotStartedError, match=r"cannot be started \(Cannot allocate memory\); end some programs, and try"
    ):
        ComfyUIProcess(ComfyUI("/comfy"), "cpu")
    assert not open_descriptors() - before
    assert not list(tmp_path.iterdir())


def test_what_a_process_answers_is_returned_or_raised_and_what_it_tells_meanwhile_is_heard(
    echo: ComfyUIProcess,
) -> None:
    heard: list[int] = []
    with echo as process:
        answer, *wrong = {"answer": {"a": 1}}, {"missing": "torch"}, {"refused": "no model"}, {"failed": "KeyError"}
        assert process.ask("say", heard.append, lines=[{"told": 1}, {"told": 2}, answer]) == {"a": 1}
        for line, words in zip(
            wrong,
            (
                f"ComfyUI of /comfy cannot be imported: {sys.executable} has no torch; run this with",
                "no model",
                "ComfyUI's own code (/comfy) failed: KeyError; run this with",
            ),
            strict=True,
        ):
            with pytest.raises(ValueError, match=f"^{re.escape(words)}"):
                process.ask("say", lines=[line])
        with pytest.raises(NoAnswerError, match=r"ended with status 1 \(its last words\)"):
            process.ask("end")
    assert heard == [1, 2]


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        {},
        {"attention": {}, "cut": {}},
        {**to_data(SPECS[FLUX]), "run": "x"},
        {"attention": 1, "cut": 1, "gather": 1},
    ],
)
def test_what_is_no_plan_is_refused(data: object) -> None:
    with pytest.raises(ValueError, match="it is no plan"):
        from_data(data)
