"""Hooks on ComfyUI's classes: what is refused, what is left behind, when ranks speak, and attention's every argument.

Owns: that no check of checks.py finds anything on any rank. Does not own: parity of models (test_hosted_parity.py).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from . import (  # noqa: F401  which add to them
    checks_build,
    checks_keeper,
    checks_kept,
    checks_layouts,
    checks_patches,
    checks_unets,
    checks_whole,
    checks_words,
)
from .checks import CHECKS

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("check", CHECKS)
def test_every_rank_finds_that(results: Path, check: str, ranks: int) -> None:
    for rank in range(ranks):
        found = json.loads((results / f"checks-{ranks}-{rank}.json").read_text())[check]
        assert not found, f"rank {rank}: {found}"
