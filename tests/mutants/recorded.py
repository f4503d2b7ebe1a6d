"""Which tests run a line, and how long each takes, from what `make coverage` recorded.

Owns the choice of tests for a place. The recording may be of an earlier tree: a file that changed since is read by
function, and tests that are gone are left out. Does not own the recording (line_coverage.py).
"""

import json
import re
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

from .places import Place, functions

ROOT = Path(__file__).resolve().parents[2]
MOST_S = 60.0  # of tests for one place, as they took while they were recorded, which is nearly twice as long
FIRST_OF_A_FUNCTION = 4  # cases of a test that come before the next test's
SCRIPTS = "tests/comfy/test_checked_in_comfyui.py::"
AHEAD_S = 5.0  # a file that names module and function comes before those that are quicker by no more
IN_COMFYUI = "nodes/host/"  # code whose other tests need a server, and say less of it
WORD = re.compile(r"\w+")
FIRST_OF_A_WAY = 3  # tests that leave a line in one way, of different functions, which come before all others


class Recording:
    """What stands in build/coverage. `sources` are the files as they are now; `there` the tests that there are."""

    def __init__(self, folder: Path, sources: dict[str, str], there: set[str]) -> None:
        self._data = sqlite3.connect(folder / "data" / "lines")
        self._now, self._then = sources, json.loads((folder / "sources.json").read_text(encoding="utf-8"))
        self._own: dict[str, float] = {}
        self._shares: dict[str, list[str]] = {}
        self._shared_s: dict[str, float] = {}
        for path in (folder / "seconds").glob("*.json"):
            noted = json.loads(path.read_text(encoding="utf-8"))
            self._shared_s |= noted["shared_s"]
            for test, said in noted["tests"].items():
                if test in there:
                    self._own[test], self._shares[test] = said["own_s"], said["shares"]
        self._ways_of: dict[str, dict[int, dict[int, set[str]]]] = {}
        self._words: dict[str, set[str]] = {}

    @property
    def changed(self) -> list[str]:
        """The files that are not as they were."""
        return [file for file, text in self._now.items() if self._then.get(file) != text]

    def tests(self, place: Place) -> list[str]:
        """The tests for a place, those of the quickest file first, as many as MOST_S lets; none that failed.

        Some of each way in which the line is left are among them: of a thousand that find a condition true, the one
        that does not may be slow. So are those whose file names module and function, slow by their imports, and
        the scripts in one loaded ComfyUI, first of all for code that runs there: they assert what functions give, and
        loading it makes each look as slow as graphs through a server.
        """
        ways = self._that_run(place)
        found = set[str]().union(*ways)
        cost = {test: self._own[test] + sum(map(self._shared_s.__getitem__, self._shares[test])) for test in found}
        first = {test for way in ways for test in self._quickest(way, cost)}
        first |= {test for test in found if test.startswith(SCRIPTS) or self._names(test, place)}
        seen: Counter[str] = Counter()
        turns = {}
        for test in sorted(cost, key=lambda test: (cost[test], test)):
            function = test.partition("[")[0]
            turns[test] = (test not in first, seen[function] >= FIRST_OF_A_FUNCTION, cost[test])
            seen[function] += 1
        taken, paid, total = [], set[str](), 0.0
        for test in sorted(turns, key=lambda test: (turns[test], test)):
            shares = set(self._shares[test]) - paid
            takes = self._own[test] + sum(map(self._shared_s.__getitem__, shares))
            if not taken or total + takes <= MOST_S:
                taken.append(test)
                paid |= shares
                total += takes
        file_of = {test: test.partition("::")[0] for test in taken}
        quickest = {file: min(cost[test] for test in taken if file_of[test] == file) for file in file_of.values()}
        for file in quickest:
            if place.file.startswith(IN_COMFYUI) and SCRIPTS.startswith(file):
                quickest[file] = 0.0
            elif self._names(file, place):
                quickest[file] -= AHEAD_S
        return sorted(taken, key=lambda test: (quickest[file_of[test]], file_of[test], cost[test]))

    def _names(self, test: str, place: Place) -> bool:
        """Whether the file of a test, or this file, names the module of a place, and its function if there is one."""
        file = test.partition("::")[0]
        if file not in self._words:
            path = ROOT / file
            self._words[file] = set(WORD.findall(path.read_text(encoding="utf-8"))) if path.exists() else set()
        return {Path(place.file).stem, place.function.rpartition(".")[2]} - {""} <= self._words[file]

    @staticmethod
    def _quickest(way: set[str], cost: dict[str, float]) -> Iterable[str]:
        """The quickest of a way's tests, one a function."""
        by_function: dict[str, str] = {}
        for test in sorted(way, key=lambda test: (cost[test], test)):
            by_function.setdefault(test.partition("[")[0], test)
        return list(by_function.values())[:FIRST_OF_A_WAY]

    def _that_run(self, place: Place) -> list[set[str]]:
        """The tests that run a place, by the line that they ran next."""
        lines = self._lines(place.file)
        then = self._then.get(place.file)
        if then is None:
            return []
        if not place.function:  # what runs at import has no test's name but in processes that a test started
            return [set().union(*(tests for ways in lines.values() for tests in ways.values()))]
        if then == self._now[place.file]:
            return list((lines.get(place.line) or lines.get(place.statement) or {}).values())
        first, last = functions(then).get(place.function, (0, 0))
        ran = (lines.get(line, {}) for line in range(first + 1, last + 1))
        return [set().union(*(tests for ways in ran for tests in ways.values()))]

    def _lines(self, file: str) -> dict[int, dict[int, set[str]]]:
        """The tests that ran each line of a file, by the line that they ran next; 0 for none."""
        if file not in self._ways_of:
            ways: dict[int, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
            came: dict[int, set[str]] = defaultdict(set)
            query = "SELECT context_id, fromno, tono FROM arc JOIN file ON file.id = file_id WHERE path LIKE ?"
            for context, begin, end in self._data.execute(query, (f"%/{file}",)):
                if (test := self._contexts[context]) in self._own:
                    ways[abs(begin)][end].add(test)
                    came[abs(end)].add(test)
            for line, tests in came.items():
                if ended := tests.difference(*ways[line].values()):
                    ways[line][0] = ended
            self._ways_of[file] = ways
        return self._ways_of[file]

    @cached_property
    def _contexts(self) -> dict[int, str]:
        return dict(self._data.execute("SELECT id, context FROM context"))
