"""How the pages of `make parity` and `make parity-models` show what was run: cells in words, tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from parity.runner import Row


def shown(row: Row) -> str:
    """The relative error of a cell."""
    return "-" if row.failure else f"{row.error:.1e}"


def verdict(row: Row) -> str:
    """What is wrong with a cell, in one line; "equal" for nothing."""
    return "; ".join(row.problems) or "equal"


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table, ending in a line break."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)
