"""The page of plans that were found, docs/found_plans.md, and its data, tools/found_plans.json.

Owns what the page says. Does not own finding (find_plans.py), nor graphs in a server (found_graphs.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tools.plan_lines import plan_lines
from tools.tables import markdown

ROOT = Path(__file__).parent.parent
PAGE, DATA = ROOT / "docs" / "found_plans.md", ROOT / "tools" / "found_plans.json"
ERROR = 1e-5  # the largest relative error of an equal call


@dataclass
class Row:
    """What was found of one class. `tried`: plans that the proof refused before it, and why."""

    path: str
    cuts: str = ""
    plan: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    error: float = 0.0
    control: float = 0.0
    seconds: float = 0.0
    others: int = 0
    resized: int = 0
    wrong: int = 0
    tried: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)  # calls that told nothing
    origin: str = ""  # of a class that is none of ours: where its file is from
    source: str = ""  # and a hash of that file


@dataclass
class GraphRow:
    """A variant's graph in a server without written plans. `error`: of its latents to stock's; `reason`: why no ranks
    shared its tokens."""

    path: str
    variant: str
    error: float | None = None
    control: float = 0.0
    cuts: str = ""
    reason: str = ""
    seconds: float = 0.0


@dataclass
class Known:
    """All of it. `unseen`: classes of later ComfyUIs, with where their files are from; `trees`: for each version of
    ComfyUI the classes whose found plan is equal there, or why there is none."""

    rows: dict[str, Row] = field(default_factory=dict)
    wrong: dict[str, Any] = field(default_factory=dict)
    graphs: dict[str, GraphRow] = field(default_factory=dict)
    unseen: dict[str, Row] = field(default_factory=dict)
    trees: dict[str, dict[str, str]] = field(default_factory=dict)

    @classmethod
    def read(cls) -> Known:
        """As it is kept."""
        kept = json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else {"rows": []}
        return cls(
            {each["path"]: Row(**each) for each in kept["rows"]},
            kept.get("wrong", {}),
            {each["variant"]: GraphRow(**each) for each in kept.get("graphs", [])},
            {each["path"]: Row(**each) for each in kept.get("unseen", [])},
            kept.get("trees", {}),
        )

    def write(self) -> None:
        """Keep it, and write the page."""
        kept = {
            "rows": [asdict(self.rows[path]) for path in sorted(self.rows)],
            "wrong": self.wrong,
            "graphs": [asdict(each) for each in self.graphs.values()],
            "unseen": [asdict(each) for each in self.unseen.values()],
            "trees": self.trees,
        }
        DATA.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(page(self), encoding="utf-8")


def as_written(row: Row) -> str:
    """How a found plan is to the one that people wrote, streams by any names."""
    from parallel_runtime.models.specs import SPECS
    from parallel_runtime.models.specs.written import to_data

    if row.path not in SPECS or not row.plan:
        return ""
    written = replace(SPECS[row.path], keeps=None)
    tables = [to_data(replace(written, gather=table)) for table in written.gathers]
    return "the same" if any(_alike(row.plan, each) for each in tables) else "another"


def _alike(one: Any, other: Any) -> bool:  # noqa: ANN401
    """Whether two plans have the same words for the same arguments, once streams are renamed one by one."""
    names: dict[str, str] = {}
    for key in ("attention", "cut", "gather"):
        mine, its = (dict(_words(plan[key])) for plan in (one, other))
        if mine.keys() != its.keys():
            return False
        for at, word in mine.items():
            here, there = (re.split(r"([a-z][a-z0-9_]*)", text) for text in (word, its[at]))
            if len(here) != len(there) or any(names.setdefault(a, b) != b for a, b in zip(here, there, strict=True)):
                return False
    return len(set(names.values())) == len(names)


def _words(table: Any, at: str = "") -> Iterator[tuple[str, str]]:  # noqa: ANN401
    if isinstance(table, str):
        yield at, table
    else:
        for key, each in table.items() if isinstance(table, dict) else enumerate(table):
            yield from _words(each, f"{at}/{key}")


INTRODUCTION = """# Plans that are found

For each class of [models.md](models.md) the plan that `find-plan` finds when the one that people wrote is
hidden from it, by looking at the class's calls. `python -m tools.find_plans --update` writes this page.
"""


def page(known: Known) -> str:
    """The page of what was found."""
    parts = [INTRODUCTION, _classes(known)]
    parts += [_unseen(known.unseen)] if known.unseen else []
    parts += [_graphs(known.graphs)] if known.graphs else []
    parts += [_wrong(known.wrong)] if known.wrong else []
    return "\n".join(parts)


def _measured(row: Row) -> tuple[str, ...]:
    """The cells that say how a row's plan was tried."""
    if not row.plan:
        return ("",) * 5
    return f"{row.error:.1e}", f"{row.control:.1e}", str(row.others), str(row.resized), str(row.wrong)


MEASURED = ("error", "control", "other calls", "of other sizes", "wrong", "seconds")


def _found(row: Row) -> str:
    return row.cuts or f"none: {row.reason.replace('|', 'or')}"


def _classes(known: Known) -> str:
    from parallel_runtime.models.specs import SPECS

    rows = [known.rows[path] for path in sorted(known.rows) if path in SPECS]
    equal = [row for row in rows if row.plan and not row.wrong]
    same = sum(as_written(row) == "the same" for row in rows)
    text = f"""**{len(equal)} of {len(rows)} classes** get a plan that is equal to one process in all cases of
`tests/models`, over 2 and 3 ranks (relative error at most {ERROR:.0e}). Each was then tried on other calls:
other numbers, timesteps, texts and sizes. "Cut once" is as by hand; "in each list" and "in each block" put
tokens together more often, which sends more. Found plans are not for PipeFusion. "The same": each argument
has the word that people gave it, as in {same} of them."""
    head = ("class", "written", "found", "as written", *(("on",) if known.trees else ()), *MEASURED)
    cells = [
        (
            f"`{row.path.removeprefix('comfy.ldm.')}`",
            f"{plan_lines(row.path)} lines",
            _found(row),
            as_written(row),
            *((_on(known.trees, row.path),) if known.trees else ()),
            *_measured(row),
            f"{row.seconds:.0f}",
        )
        for row in rows
    ]
    if known.trees:
        every = sum(_on(known.trees, row.path).startswith("every") for row in rows)
        trees = ", ".join(sorted(known.trees))
        text += f""" "On": with which of the ComfyUIs {trees} that have the class a plan
is found that is equal in all of its cases there; on every one of them for {every} classes."""
    return f"{text}\n\n{markdown(head, cells)}"


def _on(trees: Mapping[str, Mapping[str, str]], path: str) -> str:
    """The ComfyUIs with which a plan of a class is found and equal."""
    tried = [version for version, found in sorted(trees.items()) if path in found]
    equal = [version for version in tried if trees[version][path]]
    if not tried:
        return ""
    return f"every: {', '.join(equal)}" if equal == tried else ", ".join(equal) or "none"


def _unseen(rows: Mapping[str, Row]) -> str:
    from parallel_runtime.models.specs.found import SHIPPED

    shipped = {file.stem for file in SHIPPED.glob("*.json")}
    cells = [
        (
            f"`{row.path.removeprefix('comfy.ldm.')}`",
            row.origin,
            _found(row),
            "yes" if row.path in shipped else "",
            *_measured(row),
            f"{row.seconds:.0f}",
        )
        for row in rows.values()
    ]
    head = ("class", "from", "found", "shipped", *MEASURED)
    return f"""
## Classes that nobody wrote a plan for

Files of ComfyUI's that no release looked at has, or that have no plan, each beside the ComfyUI of the tests and built
small. They were chosen before anything was found of them (`python -m tools.find_plans --cases FILE --update`). Shipped:
the pack has this plan for the class's file (`python -m tools.ship_plans`), and does not look for one; it is proven
before it counts, as all are.

{markdown(head, cells)}"""


def _graphs(rows: Mapping[str, GraphRow]) -> str:
    shared = [row for row in rows.values() if row.error is not None]
    classes, with_plan = ({row.path for row in each} for each in (rows.values(), shared))
    wrong = sum(not row.error <= ERROR for row in shared if row.error is not None)
    cells = [
        (
            f"`{row.path.removeprefix('comfy.ldm.')}`",
            row.variant,
            row.cuts or f"none: {row.reason.replace('|', 'or')}",
            "" if row.error is None else f"{row.error:.1e}",
            f"{row.control:.1e}" if row.control else "",
        )
        for row in rows.values()
    ]
    return f"""
## Graphs in a server

Graphs of [models.md](models.md) in a ComfyUI in which no class has a written plan, under ulysses 2 at cfg 3, beside
stock's loader: the plan is looked for when the file is loaded, by calls that are made up, and proven before the first
step (`python -m tools.found_graphs --update`). {len(shared)} of {len(rows)} graphs and {len(with_plan)} of
{len(classes)} classes shared their tokens; {wrong} latents were wrong. The others say why; under auto they go on with
cfg and data. Plans come in this order: written, shipped, found with a file of this kind, found with another file of the
class, else looked for. Where a proof refuses one that is shipped or was found with another kind of file, one is looked
for with this file, once, in the same run: so `wan 2.2 5b i2v`, where Wan 2.1's plan was found first, has a plan of its
own. A kind: files that ComfyUI takes for the same model with the same sizes, whatever their weights and formats.

{markdown(("class", "graph", "found", "error", "control"), cells)}"""


def _wrong(wrong: Mapping[str, Any]) -> str:
    lines = [
        "",
        "## One word made wrong",
        "",
        f"Of {wrong['tried']} found plans with one word made wrong the proof refused {wrong['refused']}. "
        f"{len(wrong['equal'])} of the others computed the same in other calls too, {len(wrong['wrong'])} did not.",
        *([""] if wrong["equal"] or wrong["wrong"] else []),
        *(f"- equal: {each}" for each in wrong["equal"]),
        *(f"- wrong: {each}" for each in wrong["wrong"]),
    ]
    return "\n".join(lines) + "\n"
