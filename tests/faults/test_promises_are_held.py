"""Every promise of docs/reliability.md and SECURITY.md names a test, and each test that is named exists."""

import ast
import re

import pytest

from faults.programs import ROOT

PROMISES = ("docs/reliability.md", "SECURITY.md")


def promises(text: str) -> list[str]:
    """The rows of the tables that say what holds a promise."""
    tables = re.findall(r"^\|.*held by \|\n\| --- .*\n((?:\|.*\n)+)", text, flags=re.MULTILINE)
    return [row for table in tables for row in table.splitlines()]


def existing_tests() -> set[str]:
    """The names of all test functions."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "tests").rglob("test_*.py")]
    return {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("page", PROMISES)
def test_each_promise_names_a_test_that_exists(page):
    rows = promises((ROOT / page).read_text(encoding="utf-8"))
    assert len(rows) >= 9
    existing = existing_tests()
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row.split("|")[-2])
        assert named, f"nothing holds {row}"
        assert [name for name in named if name not in existing] == [], row


@pytest.mark.parametrize("page", PROMISES)
def test_each_command_that_is_named_is_a_target(page):
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert set(re.findall(r"`make (\w+)", (ROOT / page).read_text(encoding="utf-8"))) <= targets
