"""What is told of the steps of a sampling run. Owns the interface; progress.py has the listener of the panel."""

from collections.abc import Sequence

from ....parallel_runtime.planner.automatic import Decision
from ....parallel_runtime.proof import Proof
from ....parallel_runtime.wire.replies import StepReply


class StepListener:
    """What hears of steps as they end; this one does nothing with them."""

    def request(self, wall_s: float, ranks: Sequence[StepReply]) -> None:
        """One exchange with the workers took `wall_s`; `ranks` are their replies, by rank."""

    def compiling(self) -> None:
        """The workers make graphs of the blocks; told again and again until they have."""

    def uncompiled(self, why: str) -> None:
        """Blocks that were to run as graphs do not, as `why` tells the user."""

    def proved(self, proof: Proof) -> None:
        """What is known of the plan, for a kind of call that the run makes; told once for each."""

    def fell_back(self, decision: Decision, why: str) -> None:
        """The run goes on under another plan, which `why` tells the user."""

    def trying(self, text: str) -> None:
        """A plan is tried on a copy of the first step, as `text` tells the user."""

    def tried(self, decision: Decision, line: str) -> None:
        """Plans were tried before the first step, and the run goes on under this one, as `line` tells the user."""

    def loop_stays(self, reason: str) -> None:
        """The sampler's loop, which was to run in the workers, stays in ComfyUI."""

    def drained(self, why: str) -> None:
        """The stages of a pipeline waited between steps of a loop in the workers, as `why` tells the user."""

    def worker_loop_began(self) -> None:
        """A loop inside the workers begins."""

    def worker_loop_step(self, num_ranks: int) -> None:
        """A step of a loop inside the workers ends; they report at the end of the loop."""
