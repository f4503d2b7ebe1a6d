"""Shares of devices of different kinds, corrected by what their ranks took in a run that was measured.

Owns which runs say something of that, and that a split which was given up does not come back. The rule is
parallel_runtime/shares.py's. What ranks took apart from waiting is in a report alone, so a run without one changes
nothing.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ....parallel_runtime.planner.automatic import Decision
from ....parallel_runtime.planner.choose import HEADROOM
from ....parallel_runtime.planner.memory import fits_by_shares
from ....parallel_runtime.shares import corrected_shares
from ..panel.live_times import busy_and_waiting
from .run_context import MeasuredRequest, RunContext

log = logging.getLogger(__name__)


@dataclass
class CorrectedShares:
    """Those of one model's devices: `now`, () until a run corrected any, and `left`, which runs gave up for others."""

    now: tuple[int, ...] = ()
    left: set[tuple[int, ...]] = field(default_factory=set)

    def told(self, decision: Decision) -> Decision:
        """The decision of a run, which says so where its shares were corrected."""
        if not self.now or decision.plan.shares != decision.plan.with_shares(self.now).shares:
            return decision
        text = f"shares {':'.join(map(str, self.now))}, by what ranks took in the run before"
        if decision.plan.layout.shards > 1:
            text += "; the weights stay as they were cut"
        return replace(decision, reasons=(*decision.reasons, text))

    def after(self, run: RunContext, shares: Sequence[int], free: Sequence[int]) -> None:
        """A run under these `shares` of its devices has ended, of which each has so many bytes.

        Nothing changes where shares are equal, where not all devices computed in proportion to theirs, and where a rank
        would not have the memory that was planned.
        """
        plan = run.plan
        requests = [] if run.recorder is None else run.recorder.requests
        if not plan.shares or plan.ranks != len(shares) or max(plan.cfg, plan.pipefusion) > 1:
            return
        if run.whole or run.step_cache or run.stock_cache:
            return
        took_s = computed_s(requests[1:] if len(requests) > 1 else requests, plan.ranks)
        if took_s is None:
            return
        found = corrected_shares(shares, took_s)
        row = next((each for each in run.decision.table if each.plan == replace(plan, shares=())), None)
        room = [HEADROOM * each for each in free]
        if row is not None and not fits_by_shares(row.memory, plan.with_shares(found), room):
            log.info("SP Config: shares %s would be quicker, and a rank has no room for its share", found)
            return
        if found == tuple(shares) or found in self.left:
            return
        self.left.add(tuple(shares))
        self.now = found
        log.info("SP Config: shares %s from the next run on: ranks computed for %s s", found, took_s)


def computed_s(requests: Sequence[MeasuredRequest], ranks: int) -> list[float] | None:
    """Seconds that each of the first `ranks` ranks computed in these requests, in which it did not wait for others.

    None where one of them was not timed.
    """
    found = [0.0] * ranks
    for request in requests:
        for rank, reply in enumerate(request.ranks[:ranks]):
            if reply.ran is None or reply.ran.regions is None:
                return None
            busy_s, waits_s = busy_and_waiting(reply.ran)
            found[rank] += max(0.0, busy_s - waits_s)
    return found if requests and min(found) > 0 else None
