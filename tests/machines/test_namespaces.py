"""Two machines as network namespaces: the part of `make machines` that is always run."""

import os
import subprocess
import sys

import pytest

from machines.hosts import ROOT

pytestmark = pytest.mark.slow


def test_a_plan_over_two_namespaces_equals_one_process_and_not_without_its_exchange():
    """Fails where the kernel refuses namespaces, unless PARALLEL_DIT_NO_NAMESPACES declares that it does."""
    command = [sys.executable, "-m", "machines.cases", "--groups", "small"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    expected = "0 cases, 0 wrong" if os.environ.get("PARALLEL_DIT_NO_NAMESPACES") else "2 cases, 0 wrong"
    assert done.stdout.splitlines()[-1] == expected, done.stdout + done.stderr
    assert done.returncode == 0
