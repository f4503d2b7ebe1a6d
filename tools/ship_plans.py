"""Puts found plans into the pack: `python -m tools.ship_plans [--kept FILE] CLASS [CLASS ...]`.

CLASS: parts of the dotted paths of classes. With `--kept` their plans are those that `find-plan` and loaders keep in
FILE, else those of tools/found_plans.json that nobody wrote (`python -m tools.find_plans --cases FILE --update`), of
which no other call was wrong. COMFYUI_PATH is the ComfyUI that they were found with: a shipped plan holds for the
class's source there. Exit code 1 where there is no such plan.

Owns what may be shipped. Does not own the form (parallel_runtime/models/specs/found.py).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from host.fetch import comfyui_path
from parallel_runtime.models.specs import SPECS
from parallel_runtime.models.specs.found import SHIPPED, class_source, source_of_folder
from parallel_runtime.user_files import read_json, replace_json
from tools.found_page import Known

OTHERS = 10  # calls that were equal besides the proof's


def of_page() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Of each class of later ComfyUIs its path, its file's hash, and its entry."""
    for row in Known.read().unseen.values():
        if row.plan and not row.wrong and row.others >= OTHERS:
            errors = {"error": row.error, "control": row.control}
            yield row.path, row.source, {"from": row.origin, "cuts": row.cuts, "errors": errors, "plan": row.plan}


def of_kept(file: Path, comfyui: Path) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Of each class that was found with `comfyui` and whose plan is in a user's file."""
    for entry in read_json(file)["plans"].values():
        path, here = entry["key"]["model_class"], file_in(comfyui, entry["key"]["model_class"])
        if "plan" in entry and here.is_file() and source_of_folder(here, comfyui) == entry["key"]["source"]:
            told = {name: entry[name] for name in ("cuts", "errors", "plan")}
            yield path, class_source(here), {"from": f"ComfyUI {entry['key']['comfyui']}", **told}


def file_in(comfyui: Path, path: str) -> Path:
    """The file of a class in a ComfyUI."""
    return comfyui.joinpath(*path.split(".")[:-1]).with_suffix(".py")


def ship(folder: Path, path: str, source: str, entry: dict[str, Any]) -> Path:
    """Add the plan of a class whose file has this hash; returns the class's file of plans."""
    file = folder / f"{path}.json"
    known = read_json(file)["plans"] if file.exists() else {}
    replace_json(file, {"plans": {**known, source: entry}})
    return file


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("classes", nargs="+", help="parts of the dotted paths of classes")
    parser.add_argument("--kept", type=Path, help="a file found_plans.json of a user's cache")
    arguments = parser.parse_args()
    comfyui = comfyui_path()
    found = of_kept(arguments.kept, comfyui) if arguments.kept else of_page()
    shipped = 0
    for path, source, entry in found:
        file = file_in(comfyui, path)
        here = class_source(file) if file.is_file() else ""
        if path in SPECS or here != source or not any(each in path for each in arguments.classes):
            continue
        print(ship(SHIPPED, path, source, entry), json.dumps(entry["errors"]))  # noqa: T201
        shipped += 1
    return int(not shipped)


if __name__ == "__main__":
    sys.exit(main())
