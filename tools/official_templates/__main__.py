"""ComfyUI's own templates with the stock loader and with ours: `make templates`, which writes docs/templates.md.

    python -m tools.official_templates [--only NAME ...] [--again] [--write] [--keep FOLDER]

The templates are those that COMFYUI_PATH's requirements.txt names, in an environment of their own (build/hosts). A row
a template is kept in FOLDER (build/templates): a run that was ended goes on, and what was wrong is tried again. The
last line is `N templates, 0 wrong`; the exit status is 0 only then.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from host.client import ComfyClient, Workflow
from host.fetch import comfyui_path
from host.server import ComfyServer

from ..graph_matrix import ONE_THREAD
from ..layered import environment_for
from ..on_comfyui import chosen_comfyui
from . import package
from .expand import editor
from .files import Files
from .page import DOCUMENT, document, summary
from .trial import GONE, NOT_TRIED, WRONG, Row, Rows, Trial, first_line

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "build" / "templates"
NOT_REACHED = "the run was ended before it"
INSIDE = "OFFICIAL_TEMPLATES_OF"  # set in the environment that has them: the package's requirement


def say(text: str) -> None:
    """One line, at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="tools.official_templates", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="templates whose name holds one of these")
    parser.add_argument("--again", action="store_true", help="try what is known once more")
    parser.add_argument("--write", action="store_true", help="write docs/templates.md with what is known so far")
    parser.add_argument("--keep", type=Path, default=KEPT, help="the folder of what is known")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: makes the environment and runs itself there."""
    options(arguments)
    try:
        comfyui = chosen_comfyui()
        asked = package.required(comfyui)
        python = environment_for(comfyui, [package.graphs_of(asked)])
    except RuntimeError as error:  # NoTemplatesError and HostNotFoundError among them
        raise SystemExit(str(error)) from error
    environment = {**os.environ, "COMFYUI_PATH": str(comfyui), "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}", INSIDE: asked}
    command = [str(python), "-m", "tools.official_templates", *(sys.argv[1:] if arguments is None else arguments)]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


class Session:
    """One ComfyUI, made anew when it is of no more use. `graphs` is where expanded templates are kept."""

    def __init__(self, models: Path, graphs: Path) -> None:
        self._models, self._graphs = models, graphs
        self._stack = ExitStack()
        self._server: ComfyServer | None = None
        self._trial: Trial | None = None

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def server(self) -> ComfyServer:
        """The server, started when it is first asked for."""
        if self._server is None:
            started = ComfyServer(models=self._models, environment=ONE_THREAD)
            self._server = self._stack.enter_context(started)
        return self._server

    @property
    def trial(self) -> Trial:
        """What runs templates there."""
        if self._trial is None:
            client = ComfyClient(self.server.url)
            self._trial = Trial(client, self.server.output, Files(self._models), client.object_info())
        return self._trial

    def anew(self) -> None:
        """Ends the server; the next one has run nothing."""
        self._stack.close()
        self._server = self._trial = None

    def expand(self, templates: Sequence[package.Template]) -> None:
        """Keeps each template in API form in a file, or what the editor says of it; a page is opened for new ones."""
        missing = [each for each in templates if not self._path(each).exists()]
        if not missing:
            return
        self._graphs.mkdir(parents=True, exist_ok=True)
        with editor(self.server.url) as page:
            for template in missing:
                try:
                    found: dict[str, Any] = {"graph": page.expand(template.graph)}
                except ValueError as error:
                    found = {"error": first_line(str(error))}
                self._path(template).write_text(json.dumps(found), encoding="utf-8")

    def _path(self, template: package.Template) -> Path:
        return self._graphs / f"{template.name}.json"

    def row(self, template: package.Template) -> Row:
        """Tries a template; what is wrong once more in a ComfyUI that has run nothing, to tell what it comes of."""
        found = json.loads(self._path(template).read_text(encoding="utf-8"))
        if "error" in found:
            return Row(template.name, NOT_TRIED, template.uses, why=found["error"])
        row = self._once(template, found["graph"])
        if row.result != WRONG:
            return row
        self.anew()
        alone = self._once(template, found["graph"])
        if alone.result == WRONG:
            return alone
        return Row(**{**vars(row), "why": f"after another template, not alone: {row.why}"})

    def _once(self, template: package.Template, graph: Workflow) -> Row:
        try:
            return self.trial.row(template.name, template.uses, graph)
        except GONE as error:
            self.anew()
            return Row(template.name, WRONG, template.uses, why=f"{type(error).__name__}: {first_line(str(error))}")


def chosen(everything: Sequence[package.Template], only: Sequence[str]) -> list[package.Template]:
    """Those whose name holds one of the texts; all without one. Raises SystemExit for a text that none holds."""
    for text in only:
        if not any(text in each.name for each in everything):
            raise SystemExit(f"--only {text}: no template of this package that loads a model has such a name")
    return [each for each in everything if not only or any(text in each.name for text in only)]


def inside(asked: str) -> int:
    """Runs the templates of this environment and writes the page."""
    given = options()
    everything = list(package.templates())
    title = f"ComfyUI {comfyui_version()}, {asked.replace('==', ' ')}"
    folder = given.keep / title.replace(" ", "-").replace(",", "")
    rows = Rows(folder / "rows.jsonl")
    wanted = chosen(everything, given.only)
    with Session(KEPT / "models", folder / "graphs") as session:
        missing = [each for each in wanted if given.again or given.only or not rows.done(each.name)]
        session.expand(missing)
        for number, template in enumerate(missing, start=1):
            row = session.row(template)
            rows.add(row)
            said = f"{row.result} {row.error:.1e} {row.node} {row.why} ({row.wall_s} s)"
            say(f"{number}/{len(missing)} {row.name}: {said}")
    found = [rows.known.get(each.name, Row(each.name, NOT_TRIED, each.uses, why=NOT_REACHED)) for each in everything]
    left = [row for row in found if row.why == NOT_REACHED]
    reached = [row for row in found if row.why != NOT_REACHED]
    if given.write or (not left and not given.only):
        page = DOCUMENT.read_text(encoding="utf-8") if DOCUMENT.exists() else ""
        DOCUMENT.write_text(document({title: reached}, page, left=left), encoding="utf-8")
    elif left:
        say(f"{len(left)} templates are still to be tried; docs/templates.md is written when none is, or with --write")
    said = summary(reached)
    say(said)
    return int(not said.endswith(" 0 wrong"))


def comfyui_version() -> str:
    """The version of the ComfyUI to use."""
    said = (comfyui_path() / "comfyui_version.py").read_text(encoding="utf-8")
    return said.partition('"')[2].partition('"')[0]


if __name__ == "__main__":
    sys.exit(inside(os.environ[INSIDE]) if INSIDE in os.environ else main())
