"""What tests found on one ComfyUI, as a table: a row for each kind and family; a pytest plugin (`-p host.tally`).

A test that needs stock ComfyUI to do something first raises StockFailsError where it does not; RefusedError is for what
the pack refuses by name. To any other run of the tests both are failures.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from .client import PromptRefusedError
from .outcomes import OURS, RefusedError, StockFailsError

EQUAL, WRONG, REFUSED, STOCK_FAILS = "equal", "wrong", "refused", "stock fails"
COLUMNS = (EQUAL, WRONG, REFUSED, STOCK_FAILS)
TESTS = Path(__file__).resolve().parents[1]
# The folders whose tests depend on ComfyUI, by the word that chooses them.
PARTS = {
    "modules": "models",
    "families": "families",
    "nodes": "comfy",
    "workflows": "saved_workflows",
    "flux": "parity",
    "refusals": "refusals",
    "browser": "browser",
}
BY_FOLDER = {folder: part for part, folder in PARTS.items()}
UNKNOWN_NODE = re.compile(r"'([^']+)' not found|node (\S+) does not exist")
FOUND = "found on this ComfyUI"
ONE_OF_EACH_FAMILY = "test_a_family_of_large_files_equals_the_stock_loader"


@contextmanager
def by_stock() -> Iterator[None]:
    """What runs inside is stock ComfyUI's: raises StockFailsError for a prompt that is refused or does not succeed."""
    try:
        yield
    except (PromptRefusedError, RuntimeError) as error:
        raise StockFailsError(str(error)) from error


def stock_lacks(refused: PromptRefusedError) -> bool:
    """Whether a prompt was refused for nodes of ComfyUI's alone: absent ones, or with other inputs than it has.

    Not where such an input is linked to a node of ours, which hands on what the other does not take.
    """
    wrong = list(refused.body.get("node_errors", {}).values())
    links = [error.get("extra_info", {}).get("linked_node") for each in wrong for error in each["errors"]]
    nodes = [each["class_type"] for each in wrong]
    nodes += [refused.workflow.get(str(link[0]), {}).get("class_type", "") for link in links if link]
    nodes += [name for match in UNKNOWN_NODE.finditer(str(refused)) for name in match.groups() if name]
    return bool(nodes) and not any(name in OURS for name in nodes)


def outcome(error: BaseException | None, part: str) -> str:
    """What became of a test that ended with `error`."""
    if error is None:
        return REFUSED if part == "refusals" else EQUAL
    if isinstance(error, StockFailsError) or (isinstance(error, PromptRefusedError) and stock_lacks(error)):
        return STOCK_FAILS
    return REFUSED if isinstance(error, RefusedError) else WRONG


def row_of(item: pytest.Item) -> str:
    """The row that a test belongs to: its part; of a case, with the case's family or kind."""
    path = item.path.relative_to(TESTS) if item.path.is_relative_to(TESTS) else Path(item.path.name)
    part = BY_FOLDER.get(path.parts[0], path.parts[0])
    given = item.callspec.params if hasattr(item, "callspec") else {}
    subject = given.get("case", given.get("variant"))
    detail = getattr(subject, "kind", getattr(subject, "family", "")) if part == "families" else ""
    if part == "modules" and path.stem == "test_hosted_parity" and "name" in given:
        detail = given["name"].split()[0].strip(",")
    elif part == "flux":
        from tools.graphs import BY_NAME as GRAPHS  # here: it imports torch

        detail = GRAPHS[given["name"]].kind if given.get("name") in GRAPHS else ""
    return f"{part}: {detail}" if detail else part


def table(found: Iterable[tuple[str, str]]) -> str:
    """Counts by row and column, from pairs of them; the sums last."""
    counts: dict[str, Counter[str]] = {}
    for row, column in found:
        counts.setdefault(row, Counter())[column] += 1
    order = {part: number for number, part in enumerate(PARTS)}
    rows = sorted(counts, key=lambda row: (order.get(row.partition(":")[0], len(order)), row))
    rows, counts["all"] = [*rows, "all"], sum(counts.values(), Counter())
    width = max(map(len, rows))
    lines = ["".join([" " * width, *(f"{column:>13}" for column in COLUMNS)])]
    lines += ["".join([f"{row:<{width}}", *(f"{counts[row][column]:>13}" for column in COLUMNS)]) for row in rows]
    return "\n".join(lines)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the full tier, but for a run of each family that other runs of the tests see as modules alone."""
    kept, left = [], []
    for item in items:
        chosen = item.get_closest_marker("full") is None or item.originalname == ONE_OF_EACH_FAMILY
        (kept if chosen else left).append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = kept


class Tally:
    """Collects what became of each test. Under pytest-xdist the process that ends with the table reads reports."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[str, str]] = {}  # by a test's id, its row and column
        self.said: dict[str, str] = {}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]):
        """Write into a report what became of its test."""
        report = yield
        error = call.excinfo.value if call.excinfo is not None else None
        if error is not None or call.when == "call":
            row = row_of(item)
            column = outcome(error, row.partition(":")[0])
            first = f"{type(error).__name__}: {error}".strip().splitlines()[0][:300] if error is not None else ""
            report.user_properties.append((FOUND, [row, column, first]))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep it; what is wrong counts before what another part of the same test found.

        A failure that says nothing of what was found is wrong: pytest-xdist's of a process that died.
        """
        if report.failed and FOUND not in dict(report.user_properties):
            part = BY_FOLDER.get(Path(report.nodeid).parts[1], "files") if "/" in report.nodeid else "files"
            self.found[report.nodeid] = (part, WRONG)
            self.said[report.nodeid] = str(report.longrepr).strip().splitlines()[0][:300] if report.longrepr else "died"
        for name, value in report.user_properties:
            if name == FOUND and self.found.get(report.nodeid, ("", EQUAL))[1] != WRONG:
                row, column, first = value
                self.found[report.nodeid] = (row, column)
                self.said[report.nodeid] = first

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be imported is wrong."""
        if report.failed:
            part = BY_FOLDER.get(Path(report.nodeid).parts[1], report.nodeid) if "/" in report.nodeid else "files"
            self.found[report.nodeid], self.said[report.nodeid] = (part, WRONG), "its tests could not be collected"

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """0 with nothing wrong, whatever stock cannot do; 1 else. An interruption, or no test, stays what it is."""
        if session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            session.exitstatus = int(any(column == WRONG for _, column in self.found.values()))

    def pytest_unconfigure(self, config: pytest.Config) -> None:
        """Write what is not equal, and the table, as the last lines of the run."""
        if not self.found:
            return  # of a process of pytest-xdist, or nothing was run
        out = config.get_terminal_writer()
        for column in (REFUSED, STOCK_FAILS, WRONG):
            for test, (row, found) in self.found.items():
                if found == column and self.said[test]:
                    out.line(f"{column}: {row}: {test.rpartition('::')[2]}: {self.said[test]}")
        out.line(table(self.found.values()))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Tally(), "tally")
