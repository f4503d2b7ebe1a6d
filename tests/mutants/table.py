"""All mutants, by area."""

from __future__ import annotations

from . import panel
from .mutant import Mutant

AREAS: dict[str, tuple[Mutant, ...]] = {"panel": panel.MUTANTS}
