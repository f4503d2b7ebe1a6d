"""Which experiments there are, in which order they run, and what becomes of their results.

Owns the order, the page and the two tables that results change: choices by capability (parallel_runtime/choices.json)
and the planner's measured constants (parallel_runtime/planner/measured.json). A choice is written only where an
experiment on a GPU made it.
"""

import importlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel_runtime import choices
from parallel_runtime.planner import known

from .setting import Result, Setting

LIMIT_S = 8 * 60
BEGIN, END = "<!-- made by make gpu -->", "<!-- end -->"


@dataclass(frozen=True)
class Experiment:
    """One of them: its number, the module of this folder that runs it, and what it is about."""

    number: int
    module: str
    title: str

    def run(self, setting: Setting) -> Result:
        """Measure."""
        found: Result = importlib.import_module(f"benchmarks.gpu.{self.module}").run(setting)
        return found


# In the order of what they decide.
EXPERIMENTS = (
    Experiment(1, "boundary", "where a step's milliseconds go"),
    Experiment(2, "attention_table", "kernels of attention"),
    Experiment(4, "formats", "formats of files"),
    Experiment(3, "shares", "one rank's share, the host's time, timers"),
    Experiment(7, "chunks", "chunks of heads and rings over slow links"),
    Experiment(5, "exchange_cost", "the host's part of an exchange, and graphs"),
    Experiment(6, "block_graphs", "a graph of each block"),
    Experiment(8, "skew", "how much blocks vary"),
    Experiment(9, "two_ranks", "two ranks beside the formula"),
    Experiment(10, "beside_stock", "one rank beside stock in a ComfyUI"),
)
BY_NUMBER = {each.number: each for each in EXPERIMENTS}


def section(key: Mapping[str, str], results: Mapping[int, Mapping[str, Any]]) -> str:
    """The tables of one machine, in the order of the experiments."""
    where = ", ".join(f"{name} {value}" for name, value in key.items() if name not in ("device", "size"))
    lines = [f"### {key['device']}", "", f"{where}."]
    for each in EXPERIMENTS:
        if each.number in results:
            result = results[each.number]
            lines += ["", f"**{each.number}. {each.title}.** {result['decided']}.", "", *result["table"]]
            lines += [line for name, why in failed_of(result).items() for line in ("", f"{name} failed: {why}")]
    return "\n".join(lines)


def failed_of(result: Mapping[str, Any]) -> dict[str, str]:
    """What a result lacks, and why."""
    return dict(result.get("failed", {}))


def write_page(page: Path, text: str) -> None:
    """Put a machine's section between the page's marks, in the place of its old one.

    Sections of other devices or versions stay, and of the old one the tables of experiments that `text` lacks: the
    state file may be new while the page is not. Raises `ValueError` for a page without marks.
    """
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    kept, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{page} lacks {BEGIN} or {END}; add both where the tables belong")
    sections = [f"### {each.strip()}" for each in kept.split("### ")[1:]]
    others = [each for each in sections if _whose(each) != _whose(text)]
    old = {number: table for each in sections if each not in others for number, table in _tables(each).items()}
    tables = {**old, **_tables(text)}
    order = [*BY_NUMBER, *(number for number in tables if number not in BY_NUMBER)]
    mine = ["\n".join(_whose(text)), *(tables[number] for number in order if number in tables)]
    page.write_text(f"{before}{BEGIN}\n\n" + "\n\n".join([*others, *mine]) + f"\n\n{END}{after}", encoding="utf-8")


def _whose(text: str) -> list[str]:
    """The lines of a section that name the device and the versions."""
    return text.split("\n")[:3]


def _tables(text: str) -> dict[int, str]:
    """The parts of a section by experiment, each from its line `**N. title.**` on."""
    parts = re.split(r"^(?=\*\*\d+\. )", text, flags=re.MULTILINE)[1:]
    return {int(part[2:].partition(".")[0]): part.strip() for part in parts}


def apply(
    key: Mapping[str, str],
    capability: tuple[int, int],
    results: Mapping[int, Mapping[str, Any]],
    *,
    table: Path = choices.TABLE,
    measured: Path = known.MEASURED,
) -> None:
    """Write what the results decide, and the planner's constants, with device and versions.

    Of constants those that are the device's alone; the host's time an operation is a person's to write.
    """
    results = {number: result for number, result in results.items() if not failed_of(result)}
    chosen = {name: value for result in results.values() for name, value in result["choices"].items()}
    source = f"measured on {key['device']}, torch {key['torch']}: benchmarks/gpu.md"
    if chosen:
        rows = choices.with_choice(json.loads(table.read_text(encoding="utf-8")), capability, **chosen, source=source)
        _write(table, rows)
    constants = {name: value for result in results.values() for name, value in result["constants"].items()}
    kept = {name: float(f"{constants[name]:.3g}") for name in known.OF_RATES if name in constants}
    if kept:
        rows = json.loads(measured.read_text(encoding="utf-8"))
        name = known.table_name(key["device"])
        _write(measured, {**rows, name: {**rows.get(name, {}), **kept, "source": source}})


def _write(path: Path, rows: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
