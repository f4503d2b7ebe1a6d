"""The tool that plants mistakes: which it makes of a line, and that it tells the found ones from the others.

The command runs in a tiny tree of its own, with a recording of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mutants.places import chosen, functions, places

HERE = Path(__file__).resolve().parent
PACK = '''"""A pack."""


def clipped(value: int, most: int) -> int:
    """The value, or most."""
    if value < most:
        return value
    return most


def whole(lengths: list[int]) -> int:
    """All of them."""
    return sum(lengths)
'''
TESTS = """from parallel_runtime.pack import clipped, whole


def test_clipped() -> None:
    assert [clipped(value, 2) for value in (1, 2, 3)] == [1, 2, 2]


def test_whole() -> None:
    assert whole([1, 2]) == 3
"""
SETTINGS = '[tool.pytest.ini_options]\npythonpath = [".", "tests"]\naddopts = ["--import-mode=importlib"]\n'
EQUAL = "parallel_runtime/pack.py:6 comparison\n    - if value < most:\n    + if (value <= most):"


@pytest.mark.parametrize(
    ("line", "operator", "mistaken"),
    [
        ("x = a < b", "comparison", "x = (a <= b)"),
        ("x = a + b", "arithmetic", "x = (a - b)"),
        ("x = a and b", "boolean", "x = (a or b)"),
        ("x = 3", "constant off by one", "x = 4"),
        ("x.y = a", "statement left out", "pass"),
        ("raise ValueError(f'{a + 1} is too many')", "statement left out", "pass"),
        ("x = [a for a in b if c]", "condition negated", "x = [a for a in b if (not c)]"),
        ("x = axis.all_to_all(a, lengths)", "exchange left out", "x = a"),
        ("dist.isend(a, 1)", "exchange left out", "pass"),
        ("x = a.transpose(b, 1)", "axis swapped", "x = a.transpose(b, 2)"),
        ("x = torch.cat(a, dim=-1)", "axis swapped", "x = torch.cat(a, dim=-2)"),
        ("x = self.lengths[rank]", "lengths taken as equal", "x = self.lengths[0]"),
        ("x = theirs.version == VERSION", "version not compared", "x = True"),
        ("work.wait()", "wait not made", "pass"),
        ("x = mask[:, a:b]", "mask not cut", "x = mask"),
        ("x = parts[a:b]", "part taken twice", "x = parts[:b]"),
    ],
)
def test_a_line_has_this_mistake_among_others(line: str, operator: str, mistaken: str) -> None:
    found = {(place.operator, place.after): place.applied(line) for place in places("pack.py", line)}
    assert found[operator, mistaken] == mistaken


@pytest.mark.parametrize(
    "line",
    [
        "words.append(f'{a + 1}')",
        "'''1 + 1'''",
        "x: a[1] = b",
        "log.info(a + b)",
        "x = f'{a + 1}'",
        "def __repr__(self): return 1 + 1",
    ],
)
def test_what_is_said_to_people_has_none(line: str) -> None:
    assert places("pack.py", line) == []


def test_a_seed_chooses_the_same_places_again_and_rare_operators_as_often() -> None:
    everything = places("pack.py", "x = 3\n" * 50 + "work.wait()\n")
    assert chosen(everything, 7, 20) == chosen(everything, 7, 20) != chosen(everything, 8, 20)
    assert {place.operator for place in chosen(everything, 7, 20)} == {"constant off by one", "wait not made"}
    assert functions("class A:\n    def b(self):\n        pass\n") == {"A.b": (2, 3)}


@pytest.mark.slow
def test_survivors_are_named_and_only_those_that_are_known_are_forgiven(tmp_path: Path) -> None:
    ours = shutil.ignore_patterns("__pycache__", "test_*")
    shutil.copytree(HERE, tmp_path / "tests" / "mutants", ignore=ours)
    for name in ("line_coverage.py", "measured_process.py", "measured_tests.py"):
        shutil.copyfile(HERE.parent / name, tmp_path / "tests" / name)
    (tmp_path / "tests" / "mutants" / "panel.py").write_text("MUTANTS = ()\n")
    (tmp_path / "tests" / "mutants" / "equivalent.py").write_text("EQUIVALENT = {}\n")
    (tmp_path / "tests" / "test_pack.py").write_text(TESTS)
    (tmp_path / "parallel_runtime").mkdir()
    (tmp_path / "parallel_runtime" / "pack.py").write_text(PACK)
    (tmp_path / "pyproject.toml").write_text(SETTINGS)
    subprocess.run([shutil.which("git") or "git", "init", "-q"], cwd=tmp_path, check=True)

    status, said = _mutants(tmp_path)
    assert status == 1
    assert said.count(EQUAL) == 2  # when it is known, and at the end
    assert "lengths taken as equal: tests/test_pack.py::test_whole" in said
    assert said.splitlines()[-1] == "6 mutants, 1 survived"

    lines = "'comparison', 'if value < most:', 'if (value <= most):'"
    known = f"EQUIVALENT = {{({lines}): 'the same value either way'}}\n"
    (tmp_path / "tests" / "mutants" / "equivalent.py").write_text(known)
    status, said = _mutants(tmp_path, "--match", "comparison")
    assert status == 0
    assert "(equivalent: the same value either way)" in said
    assert said.splitlines()[-1] == "1 mutants, 1 survived"


def _mutants(tree: Path, *arguments: str) -> tuple[int, str]:
    """The command's exit status, and all that it says."""
    command = [sys.executable, "-m", "mutants", "--jobs", "1", "--preload", "pytest", *arguments]
    environment = {**os.environ, "PYTHONPATH": "tests"}
    ended = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False, timeout=900)
    assert ended.stdout, ended.stderr
    return ended.returncode, ended.stdout
