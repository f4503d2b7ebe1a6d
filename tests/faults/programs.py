"""Programs that a test runs in a process of their own, where it may break what the whole process has."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
POOL = ROOT / "tests" / "pool"


def run_program(text: str, *, inside: Sequence[str] = (), **environment: str) -> list[str]:
    """The lines that the program prints; `inside` is a command that runs another, such as `unshare`."""
    lines = text.strip("\n").splitlines()
    indent = len(lines[0]) - len(lines[0].lstrip())
    done = subprocess.run(
        [*inside, sys.executable, "-c", "\n".join(line[indent:] for line in lines)],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{POOL}:{ROOT / 'tests'}", **environment},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
