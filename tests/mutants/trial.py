"""Tries mutants in scratch copies of the tree: writes the mistake, runs the tests that must fail, writes it back.

Owns the copies and the runs of pytest. Does not own which mutants there are (table.py) nor where they lie (tree.py).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .mutant import Mutant
from .tree import Tree

LIMIT_S = 300.0  # a mutant's tests take seconds; one that makes them wait for ever is not killed by them
BASELINE_S = 1500.0
PRELOADED = Path(__file__).with_name("preloaded.py")
OPTIONS = ("-x", "-q", "--no-header", "-p", "no:cacheprovider")
FAILED = re.compile(r"^(?:FAILED|ERROR) \S*?(\w+\.py::\S+)", re.MULTILINE)
LAST_LINES = 25


@dataclass(frozen=True)
class Outcome:
    """What a run of tests came to: pytest's status, the first test that failed, the end of what it said."""

    status: int
    failed: str
    said: str
    took_s: float

    @property
    def passed(self) -> bool:
        """All tests that were named ran, and none failed."""
        return self.status == 0

    @property
    def killed(self) -> bool:
        """A test failed. No end in time, or a table that names no test, is not that."""
        return self.status == 1


class Scratch:
    """A copy of the tree's files that may be spoilt, and the process that runs its tests. One run at a time."""

    def __init__(self, tree: Tree, folder: Path) -> None:
        self.tree, self.folder = tree, folder
        self._written = 0  # seconds, of files that are spoilt: no copy was made in 1970
        for name in tree.files:
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(tree.root / name, target)
        self._runner = subprocess.Popen(
            [sys.executable, str(PRELOADED)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder
        )
        self._ready = False

    def close(self) -> None:
        """End the process that runs tests."""
        self._runner.communicate()

    def tried(self, mutant: Mutant) -> Outcome:
        """What the tests of a mutant come to while it is in place."""
        name = self.tree.place(mutant)
        pristine = (self.tree.root / name).read_text(encoding="utf-8")
        self._write(name, pristine.replace(mutant.old, mutant.new))
        try:
            return self.run([self.tree.node(test) for test in mutant.tests], limit_s=LIMIT_S)
        finally:
            self._write(name, pristine)

    def run(self, nodes: Sequence[str], *, limit_s: float) -> Outcome:
        """Run these tests here until one fails, or time is up."""
        if not self._ready:
            self._ready = self._hear() == "ready"
        log = self.folder / "pytest.log"
        began = time.monotonic()
        self._say({"folder": str(self.folder), "arguments": [*OPTIONS, *nodes], "log": str(log)})
        child = int(self._hear())
        late = threading.Timer(limit_s, _end, [child])
        late.start()
        status = int(self._hear())
        late.cancel()
        said = log.read_text(encoding="utf-8", errors="replace")
        failed = FAILED.search(said)
        last = "\n".join(said.splitlines()[-LAST_LINES:])
        return Outcome(status, failed[1] if failed else "", last, time.monotonic() - began)

    def _say(self, order: dict[str, object]) -> None:
        self._runner.stdin.write(f"{json.dumps(order)}\n")
        self._runner.stdin.flush()

    def _hear(self) -> object:
        line = self._runner.stdout.readline()
        if not line:
            raise RuntimeError("the process that runs tests has ended; see what it printed")
        return json.loads(line)

    def _write(self, name: str, text: str) -> None:
        """Write a file with a time that it never had: Python knows compiled files by time and size alone."""
        self._written += 1
        (self.folder / name).write_text(text, encoding="utf-8")
        os.utime(self.folder / name, (self._written, self._written))


def _end(child: int) -> None:
    """Kill a run and what it started, which is a session of its own."""
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
