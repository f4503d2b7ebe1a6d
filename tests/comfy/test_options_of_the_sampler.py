"""What a wrapper around the sampler puts into its options: the loop in the workers must not pass over it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from host.fetch import comfyui_path

SCRIPT = Path(__file__).resolve().parents[1] / "host" / "trace_samplers.py"


@pytest.mark.full
def test_options_that_only_the_sampler_has_are_looked_at() -> None:
    command = [sys.executable, str(SCRIPT), str(comfyui_path()), "--options"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert result.returncode == 0, result.stderr[-4000:]
    plain, after_cfg, both_sides = json.loads(result.stdout.splitlines()[-1])
    assert plain == ["", "positive"]
    assert after_cfg[0] == "a node changes what comes after cfg"
    assert both_sides == ["", "positive", "negative"]
