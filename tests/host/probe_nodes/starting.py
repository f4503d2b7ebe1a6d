"""Has a test host fork its ranks, and take the sizes that a file tells."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import comfy.model_detection


def beside(name: str) -> Any:
    """A module of the folder above, which is no package here."""
    path = Path(__file__).resolve().parents[1] / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


beside("forked_ranks").fork_ranks()
beside("told_sizes").tell_sizes(comfy.model_detection)
