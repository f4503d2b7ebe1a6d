"""A parallel MODEL goes with its last user, so that the next one's ControlNet finds no rest of it.

What is run without a server is host/forget_models.py's.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from families.hosted import WAN
from families.variants import BY_NAME
from host.fetch import comfyui_path
from host.tiny_models import TinyModels

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).resolve().parents[1] / "host" / "forget_models.py"


def test_nothing_of_a_model_outlives_its_last_clone(family_models: Path, tiny_models: TinyModels) -> None:
    """ComfyUI's manager keeps a model by its patcher; one that outlives it would be an entry without a patcher."""
    folder = family_models / "diffusion_models"
    files = {
        "hosted": folder / WAN.file,
        "parallelize": folder / WAN.file,
        "u-net": folder / BY_NAME["sdxl koala"].file,
        "flux": tiny_models.diffusion_model(tiny_models.dev),
    }
    command = [sys.executable, str(SCRIPT), str(comfyui_path()), *(f"{kind}={path}" for kind, path in files.items())]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert result.returncode == 0, result.stderr[-4000:]
    assert json.loads(result.stdout.splitlines()[-1]) == dict.fromkeys(files, [])
