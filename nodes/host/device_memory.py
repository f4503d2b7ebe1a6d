"""How much memory a plan takes of each device, told before anything is loaded.

Owns which of the planner's formulas is asked, and the words. What nobody counted is told by its weights alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ...parallel_runtime.devices import Device
from ...parallel_runtime.plan import ParallelPlan
from ...parallel_runtime.planner.automatic import ANY_GPU
from ...parallel_runtime.planner.counted import CountedModel, counted_memory
from ...parallel_runtime.planner.known import known_calibration
from ...parallel_runtime.planner.machine import whole_bytes
from ...parallel_runtime.planner.work import Work
from .pooled_model import WeightSizes

UNCOUNTED = "; what a step computes is not in this figure"


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Bytes that each device gives, of those that the smallest of them has, and of host memory for each.

    `weights_alone`: what a step takes beside the weights is not known.
    """

    device_bytes: int
    total_bytes: int
    host_bytes: int = 0
    weights_alone: bool = False

    @property
    def text(self) -> str:
        """The line on a node."""
        host = f", and {self.host_bytes / 1e9:.1f} GB of host memory" if self.host_bytes else ""
        more = UNCOUNTED if self.weights_alone else ""
        share = f"{self.device_bytes / 1e9:.1f} of {self.total_bytes / 1e9:.1f} GB on each device{host}{more}"
        return f"weights: about {share}" if self.weights_alone else f"memory: about {share}"


def needed_memory(
    plan: ParallelPlan, devices: Sequence[Device], sizes: WeightSizes, model: CountedModel | None, work: Work | None
) -> DeviceMemory:
    """What `plan` takes of each of the devices that it uses, for `work`; `model` and `work` None: of weights alone."""
    used = devices[: plan.ranks]
    total = min(whole_bytes(used))
    if model is None or work is None:
        layout = plan.layout
        part = -(-sizes.total // (layout.shards * layout.stages))
        visiting = 2 * sizes.biggest_block if layout.shards > 1 or layout.offloaded else 0
        here, host = (visiting, part) if layout.offloaded else (part + visiting, 0)
        return DeviceMemory(device_bytes=here, total_bytes=total, host_bytes=host, weights_alone=True)
    rates = known_calibration("cpu" if used[0].kind == "cpu" else ANY_GPU).rates
    memory = counted_memory(model, work, plan, rates, num_ranks=len(devices))
    return DeviceMemory(device_bytes=memory.total, total_bytes=total, host_bytes=memory.host_bytes)
