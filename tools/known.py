"""What is known of ComfyUI's classes over all ComfyUIs that were looked at: classes.csv and cases.csv, as data.

A row of classes.csv is a class of ComfyUI's list of models (or, in brackets, a transformer whose file alone was at
hand): its transformer, the oldest ComfyUI looked at that has it ("" for one that was read of alone), the newest whose
cases of tests/models were all equal over two ranks ("" for a class without a plan). A row of cases.csv is such a case.
So the page is the same whichever ComfyUI writes it. `python -m tools.known` adds what the ComfyUI of COMFYUI_PATH
has:

    --since          only which classes it has, of a ComfyUI too old for the pack
    --version 0.38 --beside DIR
                     of a ComfyUI that is another one, DIR, but for files of a newer version: what differs from DIR
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections.abc import Iterable
from contextlib import closing
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path

from host.fetch import comfyui_path, comfyui_says
from host.outcomes import RefusedError, StockFailsError
from models.ranks import Ranks, RanksFailedError
from models.supported import Found, found
from parallel_runtime.models.specs import SPECS

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class KnownClass:
    """A class of ComfyUI's list: its name, the dotted path of its transformer, and versions of ComfyUI."""

    name: str
    path: str
    since: str
    newest: str = ""


@dataclass(frozen=True)
class KnownCase:
    """A case of tests/models and the dotted path of its class."""

    name: str
    path: str


def classes() -> dict[str, KnownClass]:
    """All classes by name, in ComfyUI's order."""
    return {row[0]: KnownClass(*row) for row in _rows("classes.csv")}


def cases() -> dict[str, KnownCase]:
    """All cases by name."""
    return {row[0]: KnownCase(*row) for row in _rows("cases.csv")}


def number(version: str) -> tuple[int, ...]:
    """A version, to be compared."""
    return tuple(map(int, version.split(".")))


def came_with(since: str) -> str:
    """In words, when a class came: between the ComfyUI that has it and the one looked at before that."""
    looked_at = sorted({each.since for each in classes().values() if each.since}, key=number)
    if not since:
        return "none looked at"
    before = looked_at.index(since) - 1
    return f"{since} or before" if before < 0 else f"after {looked_at[before]}, by {since}"


def is_there(path: str) -> bool:
    """Whether the ComfyUI under test has a class."""
    module, _, name = path.rpartition(".")
    return comfyui_says(module, f"class {name}(")


def listed(comfyui: Path) -> list[str]:
    """The names of ComfyUI's list of models, without importing it."""
    text = (comfyui / "comfy" / "supported_models.py").read_text(encoding="utf-8")
    return [
        name for names in re.findall(r"^models \+?= \[(.*?)\]", text, re.M | re.S) for name in re.findall(r"\w+", names)
    ]


def since(names: Iterable[str], version: str) -> None:
    """Note that classes are there in this version."""
    known = classes()
    for name in known.keys() & set(names):
        known[name] = replace(known[name], since=_earlier(known[name].since, version))
    _write("classes.csv", known.values())


def record(said: Found, equal: set[str], version: str) -> None:
    """Note the classes and cases of one ComfyUI; `equal`: transformers whose cases are all equal."""
    found = said["classes"]
    beside = set(said["cases"].values()) - set(found.values())  # whose file alone is there
    found |= {f"({path.rpartition('.')[2]})": path for path in sorted(beside)}
    known = classes()
    for name, path in found.items():
        was = known.get(name, KnownClass(name, path, version))
        newest = max((each for each in (was.newest, version) if each), key=number) if path in equal else was.newest
        known[name] = replace(was, path=path, since=_earlier(was.since, version), newest=newest)
    _write("classes.csv", known.values())
    _write("cases.csv", [KnownCase(name, path) for name, path in ({**_pairs(), **said["cases"]}).items()])


def _earlier(one: str, other: str) -> str:
    return min((each for each in (one, other) if each), key=number)


def _pairs() -> dict[str, str]:
    return {each.name: each.path for each in cases().values()}


def _rows(name: str) -> list[list[str]]:
    path = FOLDER / name
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))[1:]


def _write(name: str, rows: Iterable[KnownClass] | Iterable[KnownCase]) -> None:
    rows = list(rows)
    with (FOLDER / name).open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([each.name for each in fields(rows[0])])
        writer.writerows(map(astuple, rows))


def _differs(path: str, other: Path) -> bool:
    """Whether a file of the folder of a class is another than that of the other ComfyUI."""
    folder = Path(*path.split(".")[:-2])
    mine = {each.relative_to(comfyui_path()): each.read_bytes() for each in (comfyui_path() / folder).glob("*.py")}
    return any(not (other / each).is_file() or (other / each).read_bytes() != text for each, text in mine.items())


def _is_equal(ranks: Ranks, name: str) -> bool:
    """Whether a case is equal over two ranks, and another without exchange."""
    from models.test_hosted_parity import test_a_shared_model_equals_the_same_module_in_one_process as compare

    try:
        ranks.run(compare, name)
    except (RanksFailedError, RefusedError, StockFailsError) as error:
        sys.stderr.write(f"{name}: {error}\n")
        return False
    return True


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--since", action="store_true")
    parser.add_argument("--version")
    parser.add_argument("--beside", type=Path)
    given = parser.parse_args()
    if given.since:
        text = (comfyui_path() / "comfyui_version.py").read_text(encoding="utf-8")
        since(listed(comfyui_path()), re.findall(r'"([\d.]+)"', text)[-1])
        return
    with closing(Ranks(comfyui_path())) as ranks:
        (said,) = ranks.run(found, ranks=1)
        right = {name: _is_equal(ranks, name) for name, path in said["cases"].items() if path in SPECS}
    equal = {path for name, path in said["cases"].items()} & set(SPECS)
    equal -= {path for name, path in said["cases"].items() if not right.get(name, True)}
    if given.beside is not None:
        differing = {path for path in equal if _differs(path, given.beside)}
        equal &= differing
    record(said, equal, given.version or said["version"])
    wrong = [name for name, well in right.items() if not well]
    sys.stdout.write(f"{len(right)} cases, wrong: {', '.join(wrong) or 'none'}; newest noted of {len(equal)} classes\n")


if __name__ == "__main__":
    main()
