"""`python -m mutants [--only TEXT] [--jobs N]`: every mutant must be killed by a test that passes without it.

Owns the order and what is printed. The last line is `N mutants, 0 survived`, and the exit status 0, when all is well.
"""

from __future__ import annotations

import argparse
import queue
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .mutant import Mutant
from .table import AREAS
from .tree import NotApplicableError, Tree
from .trial import BASELINE_S, Outcome, Scratch

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    """Try the mutants that the command line chooses; returns the exit status."""
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="mutants with this in `AREA: NAME`")
    parser.add_argument("--jobs", type=int, default=2, help="how many at once (2)")
    options = parser.parse_args()
    mutants = chosen(options.only)
    if not mutants:
        parser.error(f"--only {options.only!r} is in no mutant's `AREA: NAME`")
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs} is too few; use 1 or more")
    tree = Tree(ROOT)
    wrong = list(not_applicable(tree, mutants.values()))
    for text in wrong:
        say(f"does not apply: {text}")
    if wrong:
        return 1
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        with Copies(tree, Path(folder), options.jobs) as copies:
            return 0 if baseline(copies, tree, mutants.values()) and try_all(copies, mutants) else 1


def chosen(only: str) -> dict[str, Mutant]:
    """The mutants that have `only` in `AREA: NAME`, by that."""
    everything = {f"{area}: {mutant.name}": mutant for area, mutants in AREAS.items() for mutant in mutants}
    return {title: mutant for title, mutant in everything.items() if only in title}


def not_applicable(tree: Tree, mutants: Iterable[Mutant]) -> Iterator[str]:
    """What is wrong with each mutant whose text or tests are not found."""
    for mutant in mutants:
        try:
            tree.place(mutant)
            for test in mutant.tests:
                tree.node(test)
        except NotApplicableError as error:
            yield str(error)


class Copies:
    """As many scratch copies as jobs; each job has one for itself."""

    def __init__(self, tree: Tree, folder: Path, jobs: int) -> None:
        self._all = [Scratch(tree, folder / str(job)) for job in range(jobs)]
        self._free: queue.SimpleQueue[Scratch] = queue.SimpleQueue()
        for copy in self._all:
            self._free.put(copy)
        self._threads = ThreadPoolExecutor(jobs)

    def __enter__(self) -> Copies:
        return self

    def __exit__(self, *error: object) -> None:
        self._threads.shutdown(cancel_futures=True)
        for copy in self._all:
            copy.close()

    def each(self, work: Sequence[Callable[[Scratch], Outcome]]) -> Iterator[Outcome]:
        """Do all of `work`, the first ones first; yields the outcomes in that order."""

        def do(one: Callable[[Scratch], Outcome]) -> Outcome:
            copy = self._free.get()
            try:
                return one(copy)
            finally:
                self._free.put(copy)

        return self._threads.map(do, work)


def baseline(copies: Copies, tree: Tree, mutants: Iterable[Mutant]) -> bool:
    """Whether all tests that are named pass without a mutant. If not, a failure on one would say nothing."""
    folders: dict[str, list[str]] = defaultdict(list)  # a process a folder, which shares its servers and pools
    for node in sorted({tree.node(test) for mutant in mutants for test in mutant.tests}):
        folders[node.rpartition("/")[0]].append(node)
    parts = sorted(folders.values(), key=len, reverse=True)
    work = [lambda copy, nodes=nodes: copy.run(nodes, limit_s=BASELINE_S) for nodes in parts]
    began, passed = time.monotonic(), True
    for nodes, outcome in zip(parts, copies.each(work), strict=True):
        if not outcome.passed:
            say(f"without a mutant, of {len(nodes)} tests: {outcome.failed or outcome.status}\n{outcome.said}")
            passed = False
    if passed:
        say(f"{sum(map(len, parts))} tests pass without a mutant, {time.monotonic() - began:.0f} s")
    return passed


def try_all(copies: Copies, mutants: dict[str, Mutant]) -> bool:
    """Whether every mutant is killed."""
    survivors = []
    outcomes = copies.each([lambda copy, m=mutant: copy.tried(m) for mutant in mutants.values()])
    for title, outcome in zip(mutants, outcomes, strict=True):
        if outcome.killed:
            say(f"killed, {outcome.took_s:3.0f} s, {title}: {outcome.failed}")
        else:
            survivors.append(title)
            why = "SURVIVED" if outcome.passed else f"NOT DECIDED ({outcome.status})"
            say(f"{why}, {outcome.took_s:.0f} s, {title}\n{outcome.said}")
    for title in survivors:
        say(f"survived: {title}")
    say(f"{len(mutants)} mutants, {len(survivors)} survived")
    return not survivors


def say(text: str) -> None:
    """One line, at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
