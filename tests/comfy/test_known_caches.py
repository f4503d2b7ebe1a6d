"""ComfyUI's step caches are known by what they do, and one that does something else is not.

What is run is host/try_caches.py's.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from host.fetch import comfyui_path

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).resolve().parents[1] / "host" / "try_caches.py"


def test_a_cache_is_known_by_a_made_up_run_and_another_version_of_it_is_not() -> None:
    """EasyCache's result of a skipped call overwrites what went in; a version that leaves it alone is known as such."""
    command = [sys.executable, str(SCRIPT), str(comfyui_path())]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert result.returncode == 0, result.stderr[-4000:]
    found = json.loads(result.stdout.splitlines()[-1])
    known = {"EasyCacheHolder": True, "EasyCacheHolder: what goes in is left alone": False, "LazyCacheHolder": False}
    assert {name: told for name, told in found.items() if told is not None} == known
    assert len(found) == len(known) + 4
