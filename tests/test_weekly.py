"""`make weekly`: what it makes of commands that pass and fail, and what it runs again."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools.weekly import FURTHER, ROOT, TESTS, Step, run, state_of, steps

SCRIPT = "import sys, pathlib; pathlib.Path(sys.argv[1]).open('a').write('.'); print(sys.argv[2]); sys.exit({code})"


@pytest.mark.parametrize(
    ("last", "code", "result"),
    [("4 cases, 1 wrong", 0, "failed"), ("no such machine", 3, "exit 3"), ("1 failed, 7 passed in 3 s", 1, "exit 1")],
)
def test_what_failed_is_in_the_table_and_alone_is_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], last: str, code: int, result: str
) -> None:
    logs, python = tmp_path / "logs", (sys.executable, "-c")
    good = Step("machines", (*python, SCRIPT.format(code=0), str(tmp_path / "good"), "4 cases, 0 wrong"), logs)
    bad = Step("test-host oldest", (*python, SCRIPT.format(code=code), str(tmp_path / "bad"), last), logs)
    for times in (1, 2):
        assert run((bad, good)) == 1
        table = capsys.readouterr().out.splitlines()[-3:]
        assert table[0].split() == ["name", "result", "minutes", "last", "line"]
        assert table[1].startswith("test-host oldest") and result in table[1] and table[1].endswith(last)
        assert table[2].split()[:2] == ["machines", "passed"] and table[2].endswith("4 cases, 0 wrong")
        assert (tmp_path / "bad").read_text() == "." * times
        assert (tmp_path / "good").read_text() == "."
    assert (logs / "test-host-oldest.log").read_text() == f"{last}\n"
    assert run((good,)) == 0


def test_every_step_is_a_target_of_make() -> None:
    chosen = steps(("oldest", "/a/comfyui"), Path("/whole"), Path("/marked"), Path("/graphs"))
    assert {step.name for step in chosen if step.folder == Path("/whole")} == {
        *("test-host oldest", "test-host /a/comfyui", "test-full", "coverage", "mutants")
    }
    assert [step.name for step in chosen if step.folder == Path("/graphs")] == [
        *("parity-models", "formats", "parity", "templates")
    ]
    hosts = [step.environment["COMFYUI_PATH"] for step in chosen if "COMFYUI_PATH" in step.environment]
    assert hosts == ["oldest", "/a/comfyui"]
    named = {step.command[-1] for step in chosen}
    said = subprocess.run(["make", "-qp", "no-target"], cwd=ROOT, capture_output=True, text=True, check=False)  # noqa: S607
    assert named <= {line.partition(":")[0] for line in said.stdout.splitlines() if ":" in line}


def test_what_can_go_on_keeps_what_it_found_with_this_state_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEMPLATES_FLAGS", "--only flux")
    told = {step.name: step.environment for step in steps((), Path("/whole"), Path("/marked"), Path("/graphs"))}
    assert told["templates"] == {"TEMPLATES_FLAGS": "--only flux --keep /graphs/templates"}
    assert told["parity-models"]["PARITY_MODELS_FLAGS"].strip() == "--keep /graphs/parity-models-cells.jsonl"


def test_what_passed_holds_for_the_code_whatever_its_pages_say(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)  # noqa: S607
    (tmp_path / "tools").mkdir()
    code, page, cases = (tmp_path / "tools" / name for name in ("a.py", "page.md", "cases.csv"))
    marks = []
    for path, text in ((code, "1"), (page, "1"), (cases, "1"), (tmp_path / "README.md", "1"), (code, "2"), (code, "1")):
        path.write_text(text)
        marks.append(state_of(tmp_path))
    assert marks[0] == marks[1] == marks[2] == marks[3] == marks[5] != marks[4]
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)  # noqa: S607
    assert state_of(tmp_path) == marks[0]
    code.rename(code.with_name("b.py"))
    assert state_of(tmp_path) != marks[0]


def test_a_test_that_changes_leaves_what_matrices_found(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)  # noqa: S607
    (tmp_path / "tests" / "comfy" / "checked").mkdir(parents=True)
    unread = ("test_weekly.py", "comfy/test_tries.py", "comfy/checked/graph.py")
    for name, changes in (*((name, False) for name in unread), ("conftest.py", True), ("comfy/graphs.py", True)):
        before = state_of(tmp_path), state_of(tmp_path, TESTS)
        (tmp_path / "tests" / name).write_text("1")
        assert state_of(tmp_path) != before[0]
        assert (state_of(tmp_path, TESTS) != before[1]) == changes, name


def test_graphs_on_one_machine_do_not_read_what_commands_and_joined_machines_run() -> None:
    """Nothing imports these files but each other and tests."""
    there = {str(path.relative_to(ROOT)) for path in (ROOT / "parallel_runtime").rglob("*.py")}
    further = {name.removeprefix(":(exclude)") for name in FURTHER} - {"tests/machines"}
    apart = {name for name in there if any(name == each or name.startswith(f"{each}/") for each in further)}
    assert all(any(name.startswith(each) for name in apart) for each in further)
    script = (
        "import importlib, sys; "
        f"[importlib.import_module(name) for name in {sorted(_module(name) for name in there - apart)!r}]; "
        "print(*(each for each in sys.modules if each.startswith('parallel_runtime.')))"
    )
    ran = subprocess.run((sys.executable, "-c", script), cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {_module(name) for name in apart} & set(ran.stdout.split())


def _module(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
