"""`python -m mutants [--seed N] [--places N] [--jobs N]`: does a test fail where the code has a plausible mistake?

Tries mistakes at so many places of the pack, chosen by the seed, and the panel's; each with the tests that run its
line, quickest first, for at most a minute. Prints the survivors; the last line is `N mutants, K survived`. The exit
status is 0 where each survivor is named in equivalent.py.

A driver of its own: most lines run in workers and servers that tests start. Cosmic Ray runs one command of tests for
every mutant, and mutmut puts its mutants behind functions of the process that runs pytest.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from measured_process import FOLDER

from .equivalent import EQUIVALENT
from .panel import MUTANTS
from .places import Place, chosen, places
from .recorded import Recording
from .trial import MODULES, Outcome, each

ROOT = Path(__file__).resolve().parents[2]
CODE = ("parallel_runtime", "nodes")


@dataclass(frozen=True)
class Mistake:
    """One mutant. text: the whole file with the mistake. tests: nodes of pytest. key: as in equivalent.py."""

    title: str
    file: str
    text: str
    tests: list[str]
    shown: str = ""
    key: tuple[str, ...] = ()


def main() -> int:
    """Try what the command line chooses; returns the exit status."""
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="what chooses the places (0)")
    parser.add_argument("--places", type=int, default=200, help="how many of the pack's code (200)")
    parser.add_argument("--jobs", type=int, default=2, help="how many at once (2)")
    parser.add_argument(
        "--match", default="", metavar="TEXT", help="places whose `FILE:LINE OPERATOR` has this pattern in it"
    )
    parser.add_argument("--recording", type=Path, default=FOLDER, help="where `make coverage` wrote")
    parser.add_argument("--preload", default=MODULES, help="what is imported once, for all tests")
    parser.add_argument("--tests", nargs="+", default=[], help="try these, files of tests or nodes, not the recorded")
    options = parser.parse_args()
    if options.jobs < 1 or options.places < 0:
        parser.error(f"--jobs {options.jobs} --places {options.places}: use one job or more, and no negative number")
    if not options.tests and not (options.recording / "sources.json").exists():
        say(f"{options.recording} has no recording of what each test runs; it is made first")
        command = [sys.executable, "-m", "line_coverage", "-q", "-n", "2", "-m", "not full"]
        subprocess.run(command, cwd=ROOT, check=False)
    mistakes = [*of_the_pack(options), *([] if options.tests else of_the_panel(options.match))]
    if not mistakes:
        parser.error(f"--match {options.match!r} is in no place")
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        work = [lambda copy, m=mistake: copy.tried(m.file, m.text, m.tests) for mistake in mistakes]
        return report(mistakes, each(ROOT, Path(folder), options.jobs, work, options.preload))


def of_the_pack(options: argparse.Namespace) -> Iterator[Mistake]:
    """The places that the seed chooses, each with the tests that run it."""
    sources = files()
    there = collected(options.tests)
    recording = None if options.tests else Recording(options.recording, sources, there)
    if recording is not None and recording.changed:
        say(f"{len(recording.changed)} of {len(sources)} files have changed since `make coverage`; in those, all tests")
        say("of a function count as running each of its lines")
    everything = [place for file, text in sources.items() for place in places(file, text)]
    for place in chosen(
        [place for place in everything if re.search(options.match, title(place))], options.seed, options.places
    ):
        text = place.applied(sources[place.file])
        shown = f"    - {place.before}\n    + {place.after}"
        tests = sorted(there) if recording is None else recording.tests(place)
        yield Mistake(title(place), place.file, text, tests, shown, place.key)


def files() -> dict[str, str]:
    """The text of each file that mistakes are made in, by its name in the repository."""
    return {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for folder in CODE
        for path in sorted((ROOT / folder).rglob("*.py"))
    }


def of_the_panel(match: str) -> Iterator[Mistake]:
    """The panel's mistakes."""
    for mutant in MUTANTS:
        named = f"web: {mutant.name}"
        if re.search(match, named):
            file = mutant.place(ROOT)
            text = (ROOT / file).read_text(encoding="utf-8").replace(mutant.old, mutant.new)
            yield Mistake(named, str(file), text, list(mutant.tests))


def title(place: Place) -> str:
    """What a place is called."""
    return f"{place.file}:{place.line} {place.operator}"


def collected(among: Iterable[str] = ()) -> set[str]:
    """The tests that there are, of all or of some files or nodes."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n", "0", *among]
    said = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True).stdout
    return {line for line in said.splitlines() if "::" in line}


def report(mistakes: list[Mistake], outcomes: Iterator[Outcome]) -> int:
    """Say what becomes of each, then who survived; returns the exit status."""
    survivors: list[tuple[Mistake, str]] = []
    for mistake, outcome in zip(mistakes, outcomes, strict=True):
        if outcome.killed:
            say(f"killed, {outcome.took_s:3.0f} s, {mistake.title}: {outcome.failed or 'it cannot be imported'}")
            continue
        why = f"{len(mistake.tests)} tests pass" if outcome.status == 0 else "no end in time"
        why = why if outcome.took_s else "its tests fail without it" if mistake.tests else "no test runs it"
        survivors.append((mistake, EQUIVALENT.get(mistake.key, "")))
        say(f"SURVIVED, {outcome.took_s:.0f} s, {why}, {mistake.title}\n{mistake.shown}")
    unknown = [mistake for mistake, reason in survivors if not reason]
    for mistake, reason in survivors:
        say(f"survived: {mistake.title}{f' (equivalent: {reason})' if reason else ''}\n{mistake.shown}")
        if mistake.key and not reason:
            say(f'    {mistake.key}: "",')  # a line for equivalent.py, where its reason goes between the quotes
    untested = sum(not mistake.tests for mistake in unknown)
    say(f"{len(survivors) - len(unknown)} of the survivors are named equivalent, {untested} others no test runs")
    say(f"{len(mistakes)} mutants, {len(survivors)} survived")
    return bool(unknown)


def say(text: str) -> None:
    """At once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
