"""The tool that plants mistakes: which it makes of a line."""

from __future__ import annotations

import pytest

from mutants.places import chosen, functions, places


@pytest.mark.parametrize(
    ("line", "operator", "mistaken"),
    [
        ("x = a < b", "comparison", "x = (a <= b)"),
        ("x = a + b", "arithmetic", "x = (a - b)"),
        ("x = a and b", "boolean", "x = (a or b)"),
        ("x = 3", "constant off by one", "x = 4"),
        ("x.y = a", "statement left out", "pass"),
        ("raise ValueError(f'{a + 1} is too many')", "statement left out", "pass"),
        ("x = [a for a in b if c]", "condition negated", "x = [a for a in b if (not c)]"),
        ("x = axis.all_to_all(a, lengths)", "exchange left out", "x = a"),
        ("dist.isend(a, 1)", "exchange left out", "pass"),
        ("x = a.transpose(b, 1)", "axis swapped", "x = a.transpose(b, 2)"),
        ("x = torch.cat(a, dim=-1)", "axis swapped", "x = torch.cat(a, dim=-2)"),
        ("x = self.lengths[rank]", "lengths taken as equal", "x = self.lengths[0]"),
        ("x = theirs.version == VERSION", "version not compared", "x = True"),
        ("work.wait()", "wait not made", "pass"),
        ("x = mask[:, a:b]", "mask not cut", "x = mask"),
        ("x = parts[a:b]", "part taken twice", "x = parts[:b]"),
    ],
)
def test_a_line_has_this_mistake_among_others(line: str, operator: str, mistaken: str) -> None:
    found = {(place.operator, place.after): place.applied(line) for place in places("pack.py", line)}
    assert found[operator, mistaken] == mistaken


@pytest.mark.parametrize(
    "line",
    [
        "words.append(f'{a + 1}')",
        "'''1 + 1'''",
        "x: a[1] = b",
        "log.info(a + b)",
        "x = f'{a + 1}'",
        "def __repr__(self): return 1 + 1",
    ],
)
def test_what_is_said_to_people_has_none(line: str) -> None:
    assert places("pack.py", line) == []


def test_a_seed_chooses_the_same_places_again_and_rare_operators_as_often() -> None:
    everything = places("pack.py", "x = 3\n" * 50 + "work.wait()\n")
    assert chosen(everything, 7, 20) == chosen(everything, 7, 20) != chosen(everything, 8, 20)
    assert {place.operator for place in chosen(everything, 7, 20)} == {"constant off by one", "wait not made"}
    assert functions("class A:\n    def b(self):\n        pass\n") == {"A.b": (2, 3)}
