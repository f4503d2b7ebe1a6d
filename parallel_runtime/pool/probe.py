"""Has the ranks of a pool measure themselves over a plan's mesh, for the planner's calibration.

Owns the asking. What is measured is `rank/probe.py`'s.
"""

from typing import Any

from ..plan import ParallelPlan
from .pool import Pool


def probe(pool: Pool, plan: ParallelPlan) -> list[dict[str, Any]]:
    """Amounts and seconds of matrices, attention, memory and exchanges over ulysses, by rank. Raises PoolError."""
    pool._refuse_plan(plan)
    with pool._turns.admitted(None) as check:
        crew = pool._ready_crew(check)
        mesh = crew.mesh(plan, check, deadline_s=pool.deadline_s)
        return crew.probe(mesh, check, deadline_s=pool.deadline_s)
