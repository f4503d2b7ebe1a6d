"""Every variant of every family under every plan, beside stock ComfyUI: prints each case and writes docs/models.md.

`make parity-models` runs it. Owns: the order of the runs, the page, the count of what is wrong, which is the last line
of output. Exit code 1 when any case differs or fails, or when a run without exchange does not.

`PYTHONPATH=tests python -m tools.model_matrix [--only TEXT] [--plan NAME] [--models DIR] [--write FILE] [--keep FILE]
[--update]`
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from gpu.real_cuda.sharing import PATH

from families.cases import CONTROL_PLAN, PLANS, STAGES, Case, cases
from families.variants import FAMILIES, FILES, write_families
from host.client import ComfyClient
from host.pack_workflows import TOLERANCE
from host.server import ComfyServer
from parity.runner import VISIBLE, Bench, Row, seen

from . import usage
from .class_list import DOCUMENT, section
from .graph_matrix import ONE_THREAD
from .plan_lines import plan_lines
from .tables import markdown, shown, verdict

INTRODUCTION = f"""# Models beside stock ComfyUI

Each graph once with Load Diffusion Model and once with our loader, in one ComfyUI, fp32, on small files with random
weights that ComfyUI recognises as the family's, on CPU ranks. Compared: the saved latents (relative error, at most
{TOLERANCE:.0e}; of video and sound, the larger one), every progress event, the number of previews, the number of calls
of the model. The control is the same run under {CONTROL_PLAN} with ranks that exchange nothing: each of its latents
must differ by more than {VISIBLE:.0e}. `make parity-models` writes this file; with `--update` it runs what `--only`
names and leaves the other cases as they are here. Of the classes with a star ComfyUI's detection fixes sizes that no
test machine holds: there the test host tells it smaller ones (`tests/host/told_sizes.py`), and all else is ComfyUI's.

"Plan" is how many lines of data the pack has for the class (`parallel_runtime/models/specs`), whose code is ComfyUI's
own. [parity.md](parity.md) has the graphs of Flux.1, [templates.md](templates.md) ComfyUI's own templates.
"""


@contextmanager
def family_files(folder: Path | None, names: Sequence[str]) -> Iterator[Path]:
    """A `models` folder with what the variants named need: `folder`, else a temporary one."""
    with tempfile.TemporaryDirectory(prefix="families-") as temporary:
        yield write_families(folder or Path(temporary) / "models", only=names)


class Kept:
    """Cells that are known, in a file of a JSON object a line: a run that was ended goes on with it. None: no file."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        lines = path.read_text(encoding="utf-8").splitlines() if path is not None and path.exists() else []
        self._known = {(said["kind"], said["graph"], said["cell"]): said["row"] for said in map(json.loads, lines)}

    def row(self, case: Case, cell: str, measure: Callable[[], Row]) -> Row:
        """The row of a cell of a case: as it is kept, else measured and kept."""
        known = self._known.get((case.kind, case.name, cell))
        if known is not None:
            return Row(**{**known, "problems": tuple(known["problems"])})
        row = measure()
        if self._path is not None:
            said = {"kind": case.kind, "graph": case.name, "cell": cell, "row": asdict(row)}
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(said) + "\n")
        return row


def on_page(page: str) -> tuple[dict[Case, list[Row]], dict[Case, Row]]:
    """The cells and controls of the page's last table, of the cases that there are, as precise as they are there."""
    known = {(case.kind, case.name): case for case in cases(FAMILIES)}
    cells: dict[Case, list[Row]] = {}
    controls: dict[Case, Row] = {}
    for line in page.partition("## Each case")[2].splitlines():
        fields = [field.strip() for field in line.strip("|").split("|")]
        case = known.get((fields[0], fields[1])) if len(fields) == len(PLANS) + 3 else None
        if case is None:
            continue
        by_plan = zip(PLANS, fields[2:-1], strict=True)
        cells[case] = [_cell(case, plan, text) for plan, text in by_plan if text]
        controls[case] = _cell(case, CONTROL_PLAN, fields[-1])
        if not controls[case].problems:  # of a control, the one problem is that it differs
            controls[case] = replace(controls[case], problems=("differs",))
    return cells, controls


def merged(old: list[Row], new: list[Row]) -> list[Row]:
    """The rows of a case, a new one in the place of an old one of its plan, in the order of the plans."""
    by_plan = {row.plan: row for row in (*old, *new)}
    return [by_plan[plan] for plan in PLANS if plan in by_plan]


def _cell(case: Case, plan: str, text: str) -> Row:
    """A row out of a cell's text: an error, or what is wrong."""
    try:
        error = float(text)
    except ValueError:
        return Row(case.name, case.kind, plan, problems=(text,))
    return Row(case.name, case.kind, plan, error=error, least=error)


def run(
    bench: Bench, chosen: list[Case], plans: Sequence[str], kept: Kept
) -> tuple[dict[Case, list[Row]], dict[Case, Row]]:
    """The cells of each case, and its control; each printed as it is known."""
    cells: dict[Case, list[Row]] = {case: [] for case in chosen}
    controls: dict[Case, Row] = {}

    def cell(case: Case, plan: str) -> Row:
        row = bench.compare(case, plan)
        if "weights" in (PLANS | STAGES)[plan]:
            bench.client.free()  # shards are memory of their own, and each way to cut a file has others
        return row

    for case in chosen:
        for plan in case.plans():
            if plan in plans:
                row = kept.row(case, plan, partial(cell, case, plan))
                cells[case].append(row)
                print(row.kind, row.graph, plan, shown(row), verdict(row), sep=" | ", flush=True)  # noqa: T201
        controls[case] = kept.row(case, "control", partial(bench.control, case, CONTROL_PLAN))
        print(case.kind, case.name, "control", control_shown(controls[case]), sep=" | ", flush=True)  # noqa: T201
    return cells, controls


def control_shown(row: Row) -> str:
    """The least error of a latent without exchange; with what is wrong, where that is not seen."""
    return f"{row.least:.1e}" if seen(row) else f"not seen: {row.least:.1e}; {verdict(row)}"


def families_table(cells: dict[Case, list[Row]], controls: dict[Case, Row]) -> str:
    """A row a family and class."""
    head = ("family", "class", "variants", "plan", "cases", "largest error", "least control", "wrong")
    groups: dict[tuple[str, str], list[Case]] = {}
    for case in cells:
        groups.setdefault((case.kind, FILES[case.variant.file].class_path), []).append(case)
    rows = []
    for (kind, class_path), members in groups.items():
        names = dict.fromkeys(case.variant.name for case in members)
        found = [row for case in members for row in cells[case]]
        star = "*" if FILES[members[0].variant.file].told_by_test_host else ""
        worst = max((row.error for row in found), default=0.0)
        least = min(controls[case].least for case in members)
        wrong = sum(bool(row.problems) for row in found) + sum(not seen(controls[case]) for case in members)
        name = class_path.removeprefix("comfy.ldm.")
        rows.append(
            (
                kind,
                f"`{name}`{star}",
                ", ".join(names),
                f"{plan_lines(class_path)} lines",
                len(found),
                f"{worst:.1e}",
                f"{least:.1e}",
                wrong,
            )
        )
    return markdown(head, rows)


def cases_table(cells: dict[Case, list[Row]], controls: dict[Case, Row]) -> str:
    """A row a case, its errors by plan."""
    rows = []
    for case, found in cells.items():
        errors = {row.plan: shown(row) if not row.problems else verdict(row) for row in found}
        rows.append((case.kind, case.name, *(errors.get(plan, "") for plan in PLANS), control_shown(controls[case])))
    return markdown(("family", "variant", *PLANS, "control"), rows)


def document(cells: dict[Case, list[Row]], controls: dict[Case, Row]) -> str:
    """The text of docs/models.md."""
    tables = f"{families_table(cells, controls)}\n{section()}## Each case\n\n{cases_table(cells, controls)}"
    return f"{INTRODUCTION}\n{usage.section()}## Families\n\n{tables}\n{summary(cells, controls)}.\n"


def summary(cells: dict[Case, list[Row]], controls: dict[Case, Row]) -> str:
    """How many cases, controls included, and how many of them are wrong."""
    found = [row for rows in cells.values() for row in rows]
    wrong = sum(bool(row.problems) for row in found) + sum(not seen(row) for row in controls.values())
    return f"{len(found) + len(controls)} cases, {wrong} wrong"


def with_devices(devices: str | None) -> dict[str, dict[str, Any]]:
    """The plans, on those devices."""
    plans = PLANS | STAGES
    return plans if devices is None else {name: {**degrees, "devices": devices} for name, degrees in plans.items()}


def on_devices(devices: str | None) -> dict[str, Any]:
    """How the server is started for them: on GPUs it computes in halves unless told otherwise."""
    if devices is None:
        return {"environment": ONE_THREAD}
    names = devices.split(",")
    paths = os.pathsep.join((PATH, *filter(None, [os.environ.get("PYTHONPATH")])))
    shared = {"SHARE_ONE_GPU": "nccl", "PYTHONPATH": paths} if len(set(names)) < len(names) else {}
    return {"flags": ("--fp32-unet", "--fp32-vae"), "environment": {**shared, "START_EACH_RANK": "1"}}


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="variants whose family or name contains this, or the next")
    parser.add_argument("--plan", action="append", choices=[*PLANS, *STAGES], help="default: all without stages")
    parser.add_argument("--models", type=Path, help="keep the small files in this models folder between runs")
    parser.add_argument("--write", type=Path, help=f"default: {DOCUMENT}, when everything was run")
    parser.add_argument("--update", action="store_true", help=f"write {DOCUMENT}, whose other cases stay")
    parser.add_argument("--devices", help="GPUs for the ranks (default: CPU ranks); one GPU may stand four times")
    parser.add_argument("--keep", type=Path, help="a file of the cells that are known; a run that was ended goes on")
    arguments = parser.parse_args()
    wanted = arguments.only or [""]
    variants = [each for each in FAMILIES if any(text in f"{each.family} {each.name}" for text in wanted)]
    names, plans = [each.name for each in variants], arguments.plan or list(PLANS)
    with (
        family_files(arguments.models, names) as models,
        ComfyServer(models=models, **on_devices(arguments.devices)) as server,
    ):
        bench = Bench(ComfyClient(server.url), with_devices(arguments.devices))
        cells, controls = run(bench, cases(variants), plans, Kept(arguments.keep))
    whole = len(variants) == len(FAMILIES) and len(plans) == len(PLANS)
    target = arguments.write or (DOCUMENT if whole or arguments.update else None)
    last = summary(cells, controls)
    if arguments.update:
        before, controls_before = on_page(DOCUMENT.read_text(encoding="utf-8"))
        controls = controls_before | controls
        cells = {case: merged(before.get(case, []), cells.get(case, [])) for case in cases(FAMILIES)}
        cells = {case: rows for case, rows in cells.items() if rows}
    if target:
        target.write_text(document(cells, controls), encoding="utf-8")
    print(last)  # noqa: T201
    return int(not last.endswith(" 0 wrong"))


if __name__ == "__main__":
    sys.exit(main())
