"""Every promise of docs/reliability.md and SECURITY.md names a test that exists."""

import re

import pytest

from faults.programs import ROOT

PROMISES = ("docs/reliability.md", "SECURITY.md")


def promises(text: str) -> list[str]:
    """The rows of the tables that say what holds a promise."""
    tables = re.findall(r"^\|.*held by \|\n\| --- .*\n((?:\|.*\n)+)", text, flags=re.MULTILINE)
    return [row for table in tables for row in table.splitlines()]


def existing_tests() -> set[str]:
    """All test functions that pytest collects."""
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    return {name for text in texts for name in re.findall(r"^def (test_\w+)", text, flags=re.MULTILINE)}


@pytest.mark.parametrize("page", PROMISES)
def test_each_promise_names_a_test(page):
    rows = promises((ROOT / page).read_text(encoding="utf-8"))
    assert len(rows) == text_rows(page), "a table of promises was not read"
    existing = existing_tests()
    for row in rows:
        named = re.findall(r"`(test_\w+)`", row.split("|")[-2])
        assert named, f"nothing holds {row}"
        assert set(named) <= existing, row


def text_rows(page: str) -> int:
    """How many lines of a page name a test that holds something, counted without looking for tables."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    return sum(line.startswith("|") and "`test_" in line for line in lines)


@pytest.mark.parametrize("page", PROMISES)
def test_each_command_that_is_named_is_a_target(page):
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert set(re.findall(r"`make (\w+)", (ROOT / page).read_text(encoding="utf-8"))) <= targets
