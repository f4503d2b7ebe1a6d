"""Every tiny class of tests/models with its heads and keys sent as fp8; writes its part of docs/formats.md.

Owns the table. Does not own the cases (tests/models/cases_*.py), nor the format (parallel_runtime/parallel/
wire_format.py).

`PYTHONPATH=.:tests python -m tools.exchange_errors [--only TEXT]`; with all cases, which take a minute, the page is
written.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from host.fetch import comfyui_path
from models.cases import CASES
from models.gloo_group import GlooGroup
from models.ranks import Ranks
from models.tiny import call, difference

from .tables import markdown

PAGE = Path(__file__).resolve().parents[1] / "docs" / "formats.md"
BEGIN, END = "<!-- exchange -->\n", "<!-- end of exchange -->\n"
HEAD = ("class", "cases", "`ulysses=2`", "`ring=2`", "bytes of fp32, `ulysses=2`", "`ring=2`")
KINDS: dict[str, dict[str, Any]] = {"ulysses": {}, "ring": {"ring": True}}
Found = dict[str, Any]  # "class", and of each kind the error and the bytes, exact and as fp8


def errors_of(group: GlooGroup, name: str) -> Found | None:
    """In a rank: a case under each kind of sharing; None where its class has no plan."""
    from parallel_runtime.models.hosted.hooks import SharedModel
    from parallel_runtime.models.specs import spec_of

    model, inputs = CASES[name]()
    want = call(model, inputs)
    try:
        shared = SharedModel(model, spec_of(type(model)), group)
    except ValueError:
        return None
    found: Found = {"class": type(model).__name__}
    for kind, how in KINDS.items():
        for exchange in ("exact", "fp8"):
            shared.group = GlooGroup(**how)
            shared.group.exchange = exchange
            error = difference(call(model, inputs), want)
            found[f"{kind} {exchange}"] = [error, shared.group.axis.traffic.num_bytes]
    return found


def rows_of(cases: list[Found]) -> list[tuple[str, ...]]:
    """A row a class, those with the largest errors first: the largest of its cases, and all their bytes."""
    classes: dict[str, list[Found]] = {}
    for each in cases:
        classes.setdefault(each["class"], []).append(each)
    rows = []
    for name, found in classes.items():
        errors = [max(each[f"{kind} fp8"][0] for each in found) for kind in KINDS]
        sums = [[sum(each[f"{kind} {how}"][1] for each in found) for how in ("fp8", "exact")] for kind in KINDS]
        same = all(each[f"{kind} fp8"] == each[f"{kind} exact"] for each in found for kind in KINDS)
        told = ["exact"] * 2 if same else [f"{error:.1e}" for error in errors]
        rows.append((errors[0], (f"`{name}`", str(len(found)), *told, *(f"{a / b:.0%}" for a, b in sums))))
    return [row for _, row in sorted(rows, key=lambda each: -each[0])]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    only = parser.parse_args().only
    ranks = Ranks(comfyui_path())
    found = [each for name in CASES if only in name and (each := ranks.run(errors_of, name)[0]) is not None]
    ranks.close()
    table = markdown(HEAD, rows_of(found))
    print(table)  # noqa: T201
    if not only:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}{table}{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
