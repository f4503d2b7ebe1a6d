"""Which lines of the pack the tests run, in every process: pytest's own, servers, workers, commands.

Owns: an environment over .venv in build/coverage in which every interpreter measures from its start; the report. Does
not own: which tests run (arguments go to pytest).

A worker gets an environment that the pool writes out for it, and leaves by `os._exit`: coverage's own variable does
not reach it, and nothing that runs at exit would save. A .pth file of the interpreter does reach it, and coverage's
patch of `os._exit` saves. A process that is killed leaves nothing, so what only such processes ran counts as not run.

`PYTHONPATH=tests python -m line_coverage [PYTEST ARGUMENTS]`; the exit code is pytest's.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import coverage

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "coverage"
MEASURED = ("parallel_runtime", "nodes")
SETTINGS = """[run]
source =
    {sources}
data_file = {folder}/data/lines
parallel = true
patch = _exit
disable_warnings = no-data-collected, module-not-measured

[report]
skip_covered = true
"""
SETTINGS_OF_TESTS = {"PYTHONPATH": "tests", "START_EACH_RANK": "1"}  # a forked rank has no interpreter's start
# The variable that asks for it is gone again before anything else looks at the environment.
START = (
    "import os, coverage; os.environ['COVERAGE_PROCESS_START'] = {settings!r}; "
    "coverage.process_startup(); del os.environ['COVERAGE_PROCESS_START']\n"
)


def make_environment() -> Path:
    """The interpreter of a fresh environment that has .venv's packages and measures whatever it runs."""
    made = FOLDER / "venv"
    venv.create(made, clear=True, symlinks=True)
    python = made / "bin" / "python"
    query = "import sysconfig; print(sysconfig.get_path('purelib'))"
    command = [str(python), "-c", query]
    site = Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    (site / "1_packages.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    (site / "2_measure.pth").write_text(START.format(settings=str(FOLDER / "settings.ini")))
    return python


def main() -> int:
    """Run pytest, then print what was not run by file, and the whole of each measured folder."""
    (FOLDER / "data").mkdir(parents=True, exist_ok=True)
    for left in (FOLDER / "data").iterdir():
        left.unlink()
    settings, sources = FOLDER / "settings.ini", "\n    ".join(str(ROOT / name) for name in MEASURED)
    settings.write_text(SETTINGS.format(sources=sources, folder=FOLDER))
    command = [str(make_environment()), "-m", "pytest", *sys.argv[1:]]
    status = subprocess.run(command, cwd=ROOT, env={**os.environ, **SETTINGS_OF_TESTS}, check=False).returncode
    found = coverage.Coverage(config_file=str(settings))
    found.combine()
    found.save()
    found.report()
    for name in MEASURED:
        print(f"\n{name}:")  # noqa: T201
        found.report(include=[f"{ROOT / name}/*"], skip_covered=True, output_format="total")
    return status


if __name__ == "__main__":
    sys.exit(main())
