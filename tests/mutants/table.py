"""All mutants, by area."""

from __future__ import annotations

from . import host, hosted, panel, planner, pool, report, strategies, timing, weights, wire
from .mutant import Mutant

AREAS: dict[str, tuple[Mutant, ...]] = {
    module.__name__.rpartition(".")[2]: module.MUTANTS
    for module in (strategies, hosted, weights, wire, pool, host, planner, timing, report, panel)
}
