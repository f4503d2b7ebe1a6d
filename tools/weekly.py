"""Every slow matrix, one after the other, with one table at the end: `make weekly`, which takes hours.

What passed is not run again on the same code, with the same flags and the same ComfyUI, so it may be stopped and begun
anew. "The same code" is the content of the files that it reads (CODE), but for pages and tables; for a folder of
ComfyUI it is its commit, or else its version. Each has its log in build/weekly. The exit status is 0 where all passed.

WEEKLY_HOSTS names the ComfyUIs for `make test-host`: folders, or `oldest` (the default). What each takes from the
environment it takes here: `MUTANTS_FLAGS="--seed 7" make weekly`. A run with flags is a row of its own: it says nothing
about the run without them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CODE = (  # the matrices themselves write pages and tables
    *("parallel_runtime", "nodes", "tests", "tools", "benchmarks", "web", "demo", "__init__.py"),
    *("pyproject.toml", "requirements.txt", "constraints.txt"),  # what the environment is made from
    *("Makefile", "locales", "api_workflows", "example_workflows", "subgraphs", "docker"),
    *(".ci", ".github", ".comfyignore"),
    *(":(exclude)*.md", ":(exclude)*.csv"),
)
# What a matrix never reads, so that a test or a benchmark changed, or a figure of a GPU, leaves what it found as it is.
TESTS = (
    *(":(exclude,glob)tests/**/test_*.py", ":(exclude)tests/comfy/checked", ":(exclude)tests/mutants"),
    ":(exclude)tests/rounding.py",
    *(":(exclude)benchmarks", ":(exclude)parallel_runtime/planner/measured.json", ":(exclude)tools/weekly.py"),
    # Tests read these. A matrix takes from the Makefile its module's name and the flags, which its note has.
    *(f":(exclude){name}" for name in ("Makefile", "locales", "api_workflows", "example_workflows", "subgraphs")),
    *(f":(exclude){name}" for name in ("docker", ".ci", ".github", ".comfyignore")),
)
# What a graph on one machine never runs: commands, what they try a model with, what a joined machine does, and parts of
# tests that no graph is.
FURTHER = (
    *(f":(exclude)parallel_runtime/{name}" for name in ("__main__.py", "cli", "trials")),
    *(f":(exclude)tests/{name}" for name in ("machines", "pool", "gpu/pretend_cuda", "gpu/nccl_rules.py")),
    *(f":(exclude)parallel_runtime/machines/{name}.py" for name in ("joined", "launch", "ranks_here")),
)
RUN_TESTS = frozenset(("test-host", "test-full", "coverage", "mutants"))
BEFORE_HOSTS, AFTER_HOSTS = (
    ("parity-models", "formats", "parity", "templates"),  # graphs on one machine
    # `coverage` records which tests run which line, which `mutants` reads.
    ("test-full", "machines", "pretend-cuda", "soak", "fuzz", "endurance", "coverage", "mutants"),
)
# The variables whose flags each target of the Makefile gives to what it runs.
FLAGS = {
    "parity-models": ("PARITY_MODELS_FLAGS",),
    "formats": ("FORMATS_FLAGS",),
    "parity": ("PARITY_FLAGS",),
    "templates": ("TEMPLATES_FLAGS",),
    "test-host": ("TEST_HOST_FLAGS", "PYTEST_FLAGS"),
    "test-full": ("PYTEST_FLAGS",),
    "machines": ("MACHINES_FLAGS",),
    "pretend-cuda": ("PRETEND_FLAGS",),
    "soak": ("SOAK_FLAGS",),
    "fuzz": ("FUZZ_FLAGS",),
    "endurance": (),
    "coverage": ("PYTEST_FLAGS",),
    "mutants": ("MUTANTS_FLAGS",),
}
# The flags of those that keep what they have found, and go on with it after they were ended.
KEEP = {
    "parity-models": ("PARITY_MODELS_FLAGS", "--keep {}/parity-models-cells{}.jsonl"),
    "templates": ("TEMPLATES_FLAGS", "--keep {}/templates{}"),
}
WRONG = re.compile(r"\b[1-9]\d* (?:\w+ )?(?:wrong|failed|errors?)\b")
LAST_LINE_CHARS = 100
OLDEST = "oldest"  # the ComfyUI that tests/host/fetch.py names, which is of CODE
VERSION = re.compile(r"""^__version__ = ["'](?P<version>[^"']+)""", re.MULTILINE)


@dataclass(frozen=True)
class Step:
    """A command, the folder for its log and for what it keeps, and the variables that it has beside this process's.

    given: the flags and the ComfyUI that decide beside the code what it finds; empty where it has neither."""

    name: str
    command: Sequence[str]
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    given: str = ""


def steps(hosts: Sequence[str], tests: Path, matrices: Path, graphs: Path) -> list[Step]:
    """All of them, in order. The folders are of one state of the code: of all, and of what matrices read of it, those
    of graphs on one machine apart."""

    def step(name: str, more: dict[str, str]) -> Step:
        target = name.split()[0]
        folder = tests if target in RUN_TESTS else graphs if target in BEFORE_HOSTS else matrices
        told = given(target, more)
        if target in KEEP:
            flags, said = KEEP[target]
            more = {flags: f"{os.environ.get(flags, '')} {said.format(folder, mark_of(told))}"}
        return Step(name, ("make", "--no-print-directory", target), folder, more, told)

    found = [step(name, {}) for name in BEFORE_HOSTS]
    found += [step(f"test-host {host}", {"COMFYUI_PATH": host}) for host in hosts]
    return found + [step(name, {}) for name in AFTER_HOSTS]


def given(target: str, more: dict[str, str]) -> str:
    """The flags in a target's variables, and which ComfyUI is in the folder that it is told."""
    told = {name: " ".join(os.environ.get(name, "").split()) for name in FLAGS[target]}
    said = [f"{name}={flags}" for name, flags in told.items() if flags]
    folder = (os.environ | more).get("COMFYUI_PATH", "")
    return " ".join([*said, *([version_of(Path(folder).expanduser())] if folder not in ("", OLDEST) else [])])


def mark_of(given: str) -> str:
    """What the names of files end with that are of a run with these flags."""
    return f"-{hashlib.sha256(given.encode()).hexdigest()[:8]}" if given else ""


def version_of(comfyui: Path) -> str:
    """The commit of a ComfyUI, or the version that its file says where it is no checkout."""
    if (comfyui / ".git").exists():
        commit, changed = (_git(comfyui, *asked) for asked in (("rev-parse", "--short=12", "HEAD"), ("diff", "HEAD")))
        if commit:  # and what somebody changed since
            return f"ComfyUI {commit}{mark_of(changed)}"
    file = comfyui / "comfyui_version.py"
    found = VERSION.search(file.read_text(encoding="utf-8")) if file.is_file() else None
    return f"ComfyUI {found['version'] if found else 'without a version'}"


def _git(folder: Path, *asked: str) -> str:
    """What git says, nothing where it refuses."""
    command = ["git", "-C", str(folder), *asked]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def state_of(root: Path, without: Sequence[str] = ()) -> str:
    """A mark of the code by its content, committed or not, to name the folder of what passed on it."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *CODE, *without]
    names = subprocess.run(listed, cwd=root, check=True, capture_output=True).stdout.split(b"\0")
    mark = hashlib.sha256()
    for name in sorted(set(names)):
        path = root / os.fsdecode(name)
        if path.is_file():
            mark.update(b"%s\0%s" % (name, hashlib.sha256(path.read_bytes()).digest()))
    return mark.hexdigest()[:12]


def run(chosen: Sequence[Step]) -> int:
    """Run what has not passed yet and print the table; returns the exit status."""
    rows = []
    for step in chosen:
        step.folder.mkdir(parents=True, exist_ok=True)
        # What ran with other flags has a note of its own, so that neither is run again for the other.
        noted = step.folder / f"{re.sub(r'[^a-z0-9]+', '-', step.name.lower())}{mark_of(step.given)}.json"
        row = json.loads(noted.read_text(encoding="utf-8")) if noted.exists() else {}
        name = f"{step.name} ({step.given})" if step.given else step.name
        if row.get("result") != "passed" or row.get("given") != step.given:
            say(f"{name}: log in {noted.with_suffix('.log')}")
            row = _ran(step, noted.with_suffix(".log")) | {"given": step.given}
            noted.write_text(json.dumps(row), encoding="utf-8")
        rows.append((name, row["result"], f"{row['minutes']:.1f}", row["last_line"][:LAST_LINE_CHARS]))
    widths = [max(map(len, column)) for column in zip(("name", "result", "minutes", ""), *rows, strict=True)]
    for cells in (("name", "result", "minutes", "last line"), *rows):
        say("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())
    return int(any(row[1] != "passed" for row in rows))


def _ran(step: Step, log: Path) -> dict[str, object]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    began = time.monotonic()
    with log.open("wb") as out:
        ended = subprocess.run(
            step.command, cwd=ROOT, env=environment | step.environment, stdout=out, stderr=out, check=False
        )
    said = log.read_text(encoding="utf-8", errors="replace").splitlines()
    lines = [line.strip() for line in said if line.strip() and not line.startswith("make: ***")]
    last = lines[-1] if lines else "it said nothing"
    result = f"exit {ended.returncode}" if ended.returncode else "failed" if WRONG.search(last) else "passed"
    return {"result": result, "minutes": (time.monotonic() - began) / 60, "last_line": last}


def say(text: str) -> None:
    """One line, at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    """Run all, or what the command line names."""
    folders = (ROOT / "build" / "weekly" / state_of(ROOT, without) for without in ((), TESTS, (*TESTS, *FURTHER)))
    everything = steps(os.environ.get("WEEKLY_HOSTS", OLDEST).split(), *folders)
    parser = argparse.ArgumentParser(prog="tools.weekly", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=[step.name.split()[0] for step in everything], metavar="NAME")
    options = parser.parse_args()
    chosen = [step for step in everything if options.only is None or step.name.split()[0] in options.only]
    return run(chosen)


if __name__ == "__main__":
    sys.exit(main())
