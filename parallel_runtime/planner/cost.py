"""What a step is predicted to take, and what all predictions share. The formulas are counted.py's."""

from dataclasses import dataclass

from ..plan import ParallelPlan
from .hardware import Calibration
from .work import Work

WARMUP_STEPS = 1
RELAYED_MESSAGES = 4  # of a step, one after another: data and request there, results and reply back


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds of one step on the slowest rank. `compute_s`, `communication_s` and `launch_s` add up to `step_s`."""

    step_s: float
    compute_s: float
    communication_s: float
    launch_s: float
    warmup_step_s: float

    @property
    def bound(self) -> str:
        """What takes the most of the step: compute, communication or launch overhead."""
        parts = {"compute": self.compute_s, "communication": self.communication_s, "launch overhead": self.launch_s}
        return max(parts, key=lambda name: parts[name])

    def image_s(self, steps: int) -> float:
        """Seconds of all steps of one run."""
        warmup = min(steps, WARMUP_STEPS) if self.warmup_step_s != self.step_s else 0
        return warmup * self.warmup_step_s + (steps - warmup) * self.step_s


def relayed_s(plan: ParallelPlan, calibration: Calibration, num_bytes: float) -> float:
    """Seconds for the tensors of a step, there and back, where ranks of further machines have a part in it."""
    between = calibration.between
    if between is None or plan.ranks <= calibration.machines[0]:
        return 0.0
    return num_bytes / between.bandwidth + RELAYED_MESSAGES * between.latency_s


def rows_per_group(work: Work, plan: ParallelPlan) -> int:
    """Rows of the batch one batch group runs a step, the longest batch group's."""
    return -(-work.rows // plan.batch_groups)
