"""The templates that a ComfyUI's requirements.txt names: which package has them, and what they are.

Owns: the package's version, the graphs in it, how often each is used. Does not own: the environment that it is
installed in (tools/layered.py).
"""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGE, GRAPHS = "comfyui-workflow-templates", "comfyui-workflow-templates-json"
LOADERS = ("UNETLoader", "CheckpointLoaderSimple", "ImageOnlyCheckpointLoader")
INDEX = "index.json"


class NoTemplatesError(RuntimeError):
    """This ComfyUI's templates cannot be had; the text says why."""


@dataclass(frozen=True)
class Template:
    """A template: its name, how often its index says that it was used, its saved graph."""

    name: str
    uses: int
    path: Path

    @property
    def graph(self) -> dict[str, Any]:
        """The graph as it was saved."""
        return dict(json.loads(self.path.read_text(encoding="utf-8")))


def required(comfyui: Path) -> str:
    """The requirement of the package of templates, `name==version`. Raises NoTemplatesError where there is none."""
    for line in (comfyui / "requirements.txt").read_text(encoding="utf-8").splitlines():
        asked = line.split("#")[0].strip()
        if asked.replace("_", "-").lower().startswith(f"{PACKAGE}=="):
            return asked
    raise NoTemplatesError(f"{comfyui / 'requirements.txt'} names no {PACKAGE}==VERSION; use a ComfyUI that does")


def graphs_of(requirement: str) -> str:
    """What of that package holds the graphs alone, `name==version`; its pictures and films are hundreds of megabytes.

    Raises NoTemplatesError with pip's words where it cannot be had, or has none.
    """
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--quiet", "--dry-run"]
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        more = ["--no-deps", "--ignore-installed", "--report", str(report), requirement]
        asked = subprocess.run([*command, *more], capture_output=True, text=True, check=False)
        if asked.returncode:
            raise NoTemplatesError(f"pip could not look up {requirement}: {asked.stderr.strip()[-1000:]}")
        needs = json.loads(report.read_text(encoding="utf-8"))["install"][0]["metadata"].get("requires_dist", [])
    found = next((each for each in needs if each.startswith(f"{GRAPHS}==") and ";" not in each), None)
    if found is None:
        raise NoTemplatesError(f"{requirement} has no part {GRAPHS}; use a ComfyUI whose templates have one")
    return str(found)


def templates(folder: Path | None = None) -> Iterator[Template]:
    """Those of this environment (or of a folder) whose graph has a loader of a diffusion model, most used first."""
    place = folder or Path(str(importlib.resources.files(GRAPHS.replace("-", "_")))) / "templates"
    uses = {each["name"]: int(each.get("usage") or 0) for part in _index(place) for each in part["templates"]}
    found = [path for path in place.glob("*.json") if not path.name.startswith("index")]
    chosen = [path for path in found if any(f'"{name}"' in path.read_text(encoding="utf-8") for name in LOADERS)]
    named = [Template(path.stem, uses.get(path.stem, 0), path) for path in chosen]
    return iter(sorted(named, key=lambda each: (-each.uses, each.name)))


def _index(place: Path) -> list[dict[str, Any]]:
    path = place / INDEX
    return list(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else []


def version() -> str:
    """The version of the graphs in this environment."""
    return importlib.metadata.version(GRAPHS)
