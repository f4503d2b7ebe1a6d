"""Which lines and branches of the pack each test runs, in every process: pytest's own, servers, workers, commands.

A worker gets an environment that the pool writes out for it, and leaves by `os._exit`: coverage's own variable does
not reach it, and nothing that runs at exit would save. A .pth file of the interpreter does reach it, and coverage's
patch of `os._exit` saves. A process that is killed leaves what it ran before the test that was running then.

`PYTHONPATH=tests python -m line_coverage [PYTEST ARGUMENTS]`; the exit code is pytest's.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import coverage
from measured_process import FOLDER

ROOT = Path(__file__).resolve().parents[1]
MEASURED = ("parallel_runtime", "nodes")
SETTINGS = """[run]
source =
    {sources}
data_file = {folder}/data/lines
parallel = true
branch = true
patch =
    _exit
    fork
disable_warnings = no-data-collected, module-not-measured

[report]
skip_covered = true
"""
START = (
    "import sys; sys.path.insert(0, {tests!r}); import measured_process; sys.path.remove({tests!r}); "
    "measured_process.start({settings!r})\n"
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
    start = START.format(tests=str(ROOT / "tests"), settings=str(FOLDER / "settings.ini"))
    (site / "2_measure.pth").write_text(start)
    return python


def main() -> int:
    """Run pytest, then print what was not run by file, and the whole of each measured folder."""
    for name in ("data", "running", "seconds"):
        shutil.rmtree(FOLDER / name, ignore_errors=True)
        (FOLDER / name).mkdir(parents=True)
    settings, sources = FOLDER / "settings.ini", "\n    ".join(str(ROOT / name) for name in MEASURED)
    settings.write_text(SETTINGS.format(sources=sources, folder=FOLDER))
    files = [path for name in MEASURED for path in sorted((ROOT / name).rglob("*.py"))]
    texts = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in files}
    command = [str(make_environment()), "-m", "pytest", "-p", "measured_tests", *sys.argv[1:]]
    status = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": "tests"}, check=False).returncode
    found = coverage.Coverage(config_file=str(settings))
    found.combine()
    found.save()
    (FOLDER / "sources.json").write_text(json.dumps(texts), encoding="utf-8")
    found.report()
    for name in MEASURED:
        print(f"\n{name}:")  # noqa: T201
        found.report(include=[f"{ROOT / name}/*"], skip_covered=True, output_format="total")
    return status


if __name__ == "__main__":
    sys.exit(main())
