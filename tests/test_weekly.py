"""`make weekly`: what it makes of commands that pass and fail, and what it runs again."""

import os
import re
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest

from tools.weekly import CODE, FLAGS, FURTHER, ROOT, TESTS, Step, run, state_of, steps

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


@pytest.fixture(autouse=True)
def no_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that this run of the tests was given are none of a step's."""
    for name in {"COMFYUI_PATH", *chain.from_iterable(FLAGS.values())}:
        monkeypatch.delenv(name, raising=False)


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


def test_what_passed_with_flags_is_a_row_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran = tmp_path / "ran"
    command = (sys.executable, "-c", SCRIPT.format(code=0), str(ran), "0 wrong")
    whole, part = (
        Step("parity", command, tmp_path / "logs", {}, given) for given in ("", "PARITY_FLAGS=--only kontext")
    )
    for step, times, row in (
        (part, 1, "parity (PARITY_FLAGS=--only kontext)  passed"),
        (whole, 2, "parity  passed"),  # which the part does not stand for
        (part, 2, "parity (PARITY_FLAGS=--only kontext)  passed"),
        (whole, 2, "parity  passed"),
    ):
        assert run((step,)) == 0
        assert capsys.readouterr().out.splitlines()[-1].startswith(row)
        assert ran.read_text() == "." * times


def test_each_step_has_the_flags_that_its_target_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target, names in FLAGS.items():
        _, _, rest = text.partition(f"\n{target}:")
        recipe = rest.partition("\n\n")[0].replace("$(PYTEST)", "")
        taken = set(re.findall(r"\$\((\w+_FLAGS)\)", recipe))
        assert taken == set(names), target
        for name in names:
            monkeypatch.setenv(name, f"  --of {target}\n --few")
        given = {step.name: step.given for step in steps(("oldest",), Path("/a"), Path("/b"), Path("/c"))}
        step = "test-host oldest" if target == "test-host" else target
        assert given[step] == " ".join(f"{name}=--of {target} --few" for name in names)
        for name in names:
            monkeypatch.delenv(name)
    assert {step.given for step in steps(("oldest",), Path("/a"), Path("/b"), Path("/c"))} == {""}


def test_another_version_of_a_folders_comfyui_is_another_row(tmp_path: Path) -> None:
    def given() -> str:
        (found,) = (step.given for step in steps((str(tmp_path),), *[Path("/a")] * 3) if "test-host" in step.name)
        return found

    def git(*command: str) -> None:
        settings = ("user.name=a", "user.email=a@example.com", "commit.gpgsign=false", "core.hooksPath=/dev/null")
        told = [word for setting in settings for word in ("-c", setting)]
        subprocess.run(["git", "-C", str(tmp_path), *told, *command], check=True)  # noqa: S607

    file = tmp_path / "comfyui_version.py"
    file.write_text('# made by a script\n__version__ = "0.24.0"\n')
    assert given() == "ComfyUI 0.24.0"
    file.write_text('__version__ = "0.25.1"\n')
    assert given() == "ComfyUI 0.25.1"
    git("init", "-q")
    git("add", ".")
    said = []
    for _ in range(2):  # with the same version in the file
        git("commit", "-q", "--allow-empty", "-m", f"commit {len(said)}")
        said.append(given())
    for change in ("by hand", "by hand again"):
        file.write_text(f'__version__ = "0.25.1"  # changed {change}\n')
        said.append(given())
    assert len(set(said)) == 4 and "0.25.1" not in " ".join(said)
    assert all(each.rpartition("-")[0] == said[1] for each in said[2:])
    (tmp_path / ".git" / "HEAD").unlink()  # git refuses
    assert given() == "ComfyUI 0.25.1"


def test_what_can_go_on_keeps_what_it_found_with_this_state_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """And with other flags something else, which may be another device's."""

    def kept() -> list[str]:
        told = {step.name: step.environment for step in steps((), Path("/whole"), Path("/marked"), Path("/graphs"))}
        flags = told["templates"]["TEMPLATES_FLAGS"], told["parity-models"]["PARITY_MODELS_FLAGS"]
        return [each.strip() for each in flags]

    assert kept() == ["--keep /graphs/templates", "--keep /graphs/parity-models-cells.jsonl"]
    monkeypatch.setenv("TEMPLATES_FLAGS", "--only flux")
    monkeypatch.setenv("PARITY_MODELS_FLAGS", "--devices cuda:0,cuda:1")
    templates, cells = kept()
    assert re.fullmatch("--only flux --keep /graphs/templates-[0-9a-f]{8}", templates)
    assert re.fullmatch("--devices cuda:0,cuda:1 --keep /graphs/parity-models-cells-[0-9a-f]{8}.jsonl", cells)


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
    unread = (
        *("tests/test_weekly.py", "tests/comfy/test_tries.py", "tests/comfy/checked/graph.py", "tests/rounding.py"),
        *("Makefile", ".ci/run"),
        *("locales/en/main.json", "api_workflows/a.json", "example_workflows/a.json", "subgraphs/a.json"),
    )
    read = ("tests/conftest.py", "tests/comfy/graphs.py", "demo/graphs.py", "requirements.txt", "pyproject.toml")
    for name, changes in (*((name, False) for name in unread), *((name, True) for name in read)):
        before = state_of(tmp_path), state_of(tmp_path, TESTS)
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
        assert state_of(tmp_path) != before[0]
        assert (state_of(tmp_path, TESTS) != before[1]) == changes, name


def test_what_tests_allow_is_read_by_them_alone() -> None:
    asked = ("git", "grep", "-lE", "^ *(from|import) rounding\\b", "--", "*.py")
    readers = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert all(Path(reader).name.startswith("test_") for reader in readers)


def test_what_tests_read_is_of_the_code() -> None:
    """Pages are left out: what matrices write there would have them run again."""
    pages = {"README.md", "CHANGELOG.md", "LICENSE", "docs", ".gitignore", ".pre-commit-config.yaml"}
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)  # noqa: S607
    named = {line.partition("/")[0] for line in listed.stdout.splitlines()}
    assert {name for name in named - pages if not name.endswith(".md")} == {name for name in CODE if name[0] != ":"}


def test_graphs_on_one_machine_do_not_read_what_commands_and_joined_machines_run() -> None:
    """Nothing imports these files but each other and tests; nor do the matrices of graphs import those of tests."""
    there = {str(path.relative_to(ROOT)) for path in (ROOT / "parallel_runtime").rglob("*.py")}
    further = {name.removeprefix(":(exclude)") for name in FURTHER}
    of_tests = {each for each in further if each.startswith("tests/")}
    apart = {name for name in there if any(name == each or name.startswith(f"{each}/") for each in further)}
    assert all(any(name.startswith(each) for name in apart) for each in further - of_tests)
    assert not {_module(name) for name in apart} & set(_imported(*(_module(name) for name in there - apart)))
    assert all((ROOT / each).exists() for each in of_tests)
    matrices = ("model_matrix", "formats", "graph_matrix", "official_templates.__main__")
    read = _imported(*(f"tools.{name}" for name in matrices))
    named = [_module(each).removeprefix("tests.") for each in of_tests]
    assert "host" in read and not [each for each in read if any(f"{each}.".startswith(f"{name}.") for name in named)]


def _imported(*modules: str) -> list[str]:
    """What has been imported once these are."""
    script = (
        f"import importlib, sys; [importlib.import_module(name) for name in {sorted(modules)!r}]; print(*sys.modules)"
    )
    return subprocess.run(
        (sys.executable, "-c", script),
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": "tests"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()


def _module(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
