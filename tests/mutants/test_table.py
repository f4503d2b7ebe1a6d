"""The table of mutants fits the tree: each mistake can still be made, once, and its tests are there.

Cheap, so that whoever moves code hears of it at once; `make mutants` is what shows that they are found.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from mutants.mutant import Mutant
from mutants.table import AREAS
from mutants.tree import NotApplicableError, Tree

LEAST = 19


@pytest.fixture(scope="module")
def tree() -> Tree:
    return Tree(Path(__file__).resolve().parents[2])


@pytest.mark.parametrize("area", AREAS)
def test_every_mutant_applies_once_and_names_tests_that_exist(tree: Tree, area: str) -> None:
    for mutant in AREAS[area]:
        path = tree.root / tree.place(mutant)
        if path.suffix == ".py":
            compile(path.read_text(encoding="utf-8").replace(mutant.old, mutant.new), path, "exec")
        assert mutant.tests, mutant.name
        assert all(tree.node(test) for test in mutant.tests)


def test_there_are_enough_and_each_has_a_name_of_its_own() -> None:
    titles = Counter(f"{area}: {mutant.name}" for area, mutants in AREAS.items() for mutant in mutants)
    assert titles.total() >= LEAST
    assert [title for title, count in titles.items() if count > 1] == []


@pytest.mark.parametrize(
    ("old", "new", "test"),
    [
        ("no such text stands anywhere", "x", "test_shard.py::test_parts_that_cannot_be_are_refused"),
        ("import torch", "x", "test_shard.py::test_parts_that_cannot_be_are_refused"),
        ("EPS = 1e-6", "EPS = 1e-6", "test_shard.py::test_parts_that_cannot_be_are_refused"),
        ("EPS = 1e-6", "EPS = 1e-5", "test_shard.py::test_that_nobody_wrote"),
    ],
    ids=["nowhere", "many times", "no mistake", "no test"],
)
def test_a_mutant_that_does_not_apply_is_refused(tree: Tree, old: str, new: str, test: str) -> None:
    mutant = Mutant("a mistake", old, new, (test,))
    with pytest.raises(NotApplicableError):
        tree.place(mutant)
        tree.node(test)
