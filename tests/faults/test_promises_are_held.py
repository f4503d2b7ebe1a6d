"""Every promise of docs/reliability.md and SECURITY.md names a test that exists, runs in `make test`, and can fail."""

import ast
import re

import pytest

from faults.programs import ROOT

PROMISES = ("docs/reliability.md", "SECURITY.md")


def promises(text: str) -> list[str]:
    """The rows of the tables that say what holds a promise."""
    tables = re.findall(r"^\|.*held by \|\n\| --- .*\n((?:\|.*\n)+)", text, flags=re.MULTILINE)
    return [row for table in tables for row in table.splitlines()]


def existing_tests() -> dict[str, tuple[ast.FunctionDef, ast.Module]]:
    """All test functions that pytest collects, and the module of each."""
    found = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found |= {node.name: (node, tree) for node in tree.body if isinstance(node, ast.FunctionDef)}
    return found


def why_it_cannot_fail(test: ast.FunctionDef, module: ast.Module) -> str:
    """What keeps a test from failing: a mark, a skip, or that neither it nor a helper of its file expects anything."""
    marks = [ast.unparse(mark) for mark in test.decorator_list]
    marks += [ast.unparse(node.value) for node in module.body if isinstance(node, ast.Assign) and _names_marks(node)]
    if any(word in mark for mark in marks for word in ("skip", "xfail")):
        return "it is marked to be skipped, or to fail"
    called = {ast.unparse(node.func) for node in ast.walk(test) if isinstance(node, ast.Call)}
    if {"pytest.skip", "pytest.xfail", "pytest.importorskip"} & called:
        return "it skips itself"
    helpers = [node for node in module.body if isinstance(node, ast.FunctionDef) and node.name in called]
    if not any(_expects(node) for each in (test, *helpers) for node in ast.walk(each)):
        return "it expects nothing"
    return ""


def _names_marks(node: ast.Assign) -> bool:
    return any(isinstance(target, ast.Name) and target.id == "pytestmark" for target in node.targets)


def _expects(node: ast.AST) -> bool:
    """Whether the node is an assertion of something that is not settled already, or waits for an error."""
    if isinstance(node, ast.Assert):
        return not isinstance(node.test, ast.Constant)
    named = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    # helpers of other files that assert: an error of a request, and what comes
    return named in ("pytest.raises", "failure", "expect", "wait_until")


@pytest.mark.parametrize("page", PROMISES)
def test_each_promise_names_a_test_that_can_fail(page):
    rows = promises((ROOT / page).read_text(encoding="utf-8"))
    assert len(rows) == text_rows(page), "a table of promises was not read"
    existing = existing_tests()
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row.split("|")[-2])
        assert named, f"nothing holds {row}"
        assert [name for name in named if name not in existing] == [], row
        reasons = {name: why_it_cannot_fail(*existing[name]) for name in named}
        assert {name: reason for name, reason in reasons.items() if reason} == {}, row


def text_rows(page: str) -> int:
    """How many lines of a page name a test that holds something, counted without looking for tables."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    return sum(line.startswith("|") and "`test_" in line for line in lines)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("def test_it():\n    assert found() == 1", ""),
        ("def test_it():\n    with pytest.raises(ValueError):\n        run()", ""),
        ("def check():\n    assert found()\ndef test_it():\n    check()", ""),
        ("def test_it():\n    run()", "it expects nothing"),
        ("def test_it():\n    assert True", "it expects nothing"),
        ("def check():\n    assert found()\ndef test_it():\n    run()", "it expects nothing"),
        ("@pytest.mark.skip\ndef test_it():\n    assert found()", "it is marked to be skipped, or to fail"),
        ("pytestmark = pytest.mark.skipif(True)\ndef test_it():\n    assert found()", "it is marked to be skipped"),
        ("def test_it():\n    pytest.skip('no')\n    assert found()", "it skips itself"),
    ],
)
def test_a_test_that_cannot_fail_is_seen(text, reason):
    module = ast.parse(text)
    found = why_it_cannot_fail(next(node for node in module.body if getattr(node, "name", "") == "test_it"), module)
    assert found.startswith(reason) and bool(found) == bool(reason)


@pytest.mark.parametrize("page", PROMISES)
def test_each_command_that_is_named_is_a_target(page):
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert set(re.findall(r"`make (\w+)", (ROOT / page).read_text(encoding="utf-8"))) <= targets
