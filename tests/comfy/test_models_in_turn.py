"""A parallel MODEL goes with its last user, so that the next one's ControlNet finds no rest of it."""

from __future__ import annotations

import json
from pathlib import Path

from families.hosted import WAN
from families.variants import write_families
from host.tiny_models import TinyModels

SCRIPT = Path(__file__).resolve().parents[1] / "host" / "forget_models.py"


def test_nothing_of_a_model_outlives_its_last_clone(in_comfyui, tmp_path: Path, tiny_models: TinyModels) -> None:
    """ComfyUI's manager keeps a model by its patcher; one that outlives it would be an entry without a patcher."""
    folder = write_families(tmp_path, only=[WAN.name]) / "diffusion_models"
    files = {
        "hosted": folder / WAN.file,
        "parallelize": folder / WAN.file,
        "flux": tiny_models.diffusion_model(tiny_models.dev),
    }
    printed = in_comfyui(SCRIPT, *(f"{kind}={path}" for kind, path in files.items()))
    assert json.loads(printed[-1]) == dict.fromkeys(files, [])
