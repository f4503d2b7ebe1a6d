"""`make mutants`: which mistakes are known to be none, and which tests come first."""

from collections import Counter

import pytest
from mutants.__main__ import Mistake, files, report
from mutants.equivalent import EQUIVALENT
from mutants.places import places
from mutants.recorded import Recording
from mutants.trial import Outcome


def test_each_mistake_that_is_named_equivalent_is_one_of_exactly_one_place() -> None:
    sources, named = files(), sorted({key[0] for key in EQUIVALENT})
    there = Counter(place.key for file in named for place in places(file, sources.get(file, "")))
    assert {key: there[key] for key in EQUIVALENT} == dict.fromkeys(EQUIVALENT, 1)
    assert all(EQUIVALENT.values())


def test_the_same_line_of_another_file_or_function_is_another_mistake() -> None:
    line = "    worker.join()\n"
    text = f"def stop(worker):\n{line}\n\nclass Pool:\n    def stop(self, worker):\n    {line}"
    keys = [place.key for file in ("a.py", "b.py") for place in places(file, text)]
    assert keys == [
        (file, function, "wait not made", "worker.join()", "pass")
        for file in ("a.py", "b.py")
        for function in ("stop", "Pool.stop")
    ]


def test_a_survivor_is_printed_as_a_line_of_those_that_are_equivalent(capsys: pytest.CaptureFixture[str]) -> None:
    known = next(iter(EQUIVALENT))
    unknown = (*known[:4], "another line")
    mistakes = [Mistake("a place", known[0], "", ["a test"], key=key) for key in (known, unknown)]
    survived = Outcome(status=0, took_s=1.0)
    assert report(mistakes, iter([survived, survived])) == 1
    assert [line for line in capsys.readouterr().out.splitlines() if known[3] in line] == [f'    {unknown}: "",']


def test_a_constants_tests_are_those_whose_file_names_its_module() -> None:
    recording = Recording.__new__(Recording)
    recording._words = {"test_a.py": {"channel"}, "test_b.py": {"other", "LIMIT"}}
    (place,) = (each for each in places("wire/channel.py", "LIMIT = 4\n") if not each.function)
    assert [recording._names(f"{file}::test", place) for file in recording._words] == [True, False]
