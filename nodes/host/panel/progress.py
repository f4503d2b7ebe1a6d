"""Starting, loading and each step, told on the node that waits for it. Text, not the bar: its events count steps."""

import re
import time
from collections.abc import Sequence

from ....parallel_runtime.planner.automatic import Decision
from ....parallel_runtime.proof import NOT_PROVEN, Proof
from ....parallel_runtime.wire.replies import StepReply
from ..contract.comfyui import PromptServer, get_progress_state
from ..contract.writers import executing, executing_node
from ..sampling.step_listener import StepListener
from .report_history import graph_of

INTERVAL_S = 0.2
EVENT = "parallel_dit.text"


def prompt_id() -> str:
    """ComfyUI's id of the prompt that executes now, _ for the slashes that a client may give it; "" outside of one."""
    context = executing()
    return "" if context is None else re.sub(r"[/\\]", "_", context.prompt_id)


class NodeText:
    """Writes on the node that executes now; nowhere when none does.

    Nodes of this pack have a box for it. ComfyUI's own text makes a node grow over the one below, and stays for the
    nodes of others.
    """

    def __init__(self) -> None:
        self._node = executing_node()
        self._of = {} if (context := executing()) is None else graph_of(context.prompt_id)
        self._next_s = 0.0

    def say(self, text: str) -> None:
        """Show `text` in place of what was shown. The pack's box shows nothing of a client without an id: what ends it
        would reach no page."""
        node = self._node
        if node is None:
            return
        server = PromptServer.instance
        if node.ours and server.client_id is None:
            return
        if node.ours:
            server.send_sync(EVENT, {"node_id": node.node_id, "text": text, **self._of}, server.client_id)
        else:
            server.send_progress_text(text, node.node_id)

    def loading(self, name: str, loaded_bytes: int, total_bytes: int) -> None:
        """One report of the pool's `load`, counted over all ranks; shown at most every `INTERVAL_S`."""
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + INTERVAL_S
            self.say(f"Loading {name}: {loaded_bytes / 1e9:.2f} of {total_bytes / 1e9:.2f} GB")

    def counting(self, name: str, since_s: float) -> None:
        """What a step computes is being counted, for that long; shown once a second."""
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + 1.0
            self.say(f"counting what a step of {name} computes: {since_s:.0f} s")


class OncePerPrompt:
    """Whether something was said in the prompt that executes now."""

    def __init__(self) -> None:
        self._prompt_id: str | None = None

    def first_time(self) -> bool:
        """True once in each prompt."""
        now = prompt_id()
        first = now != self._prompt_id
        self._prompt_id = now
        return first


class StepText(StepListener):
    """What a step of one run took, written on the node that samples, at most every `INTERVAL_S` and after the last.

    Auto's plan of the run is told when it begins and under each of its steps; a given one is on SP Config. So is a plan
    that could not be proven, and why the sampler's loop stays in ComfyUI.
    """

    def __init__(self, decision: Decision) -> None:
        self._next_s = 0.0
        self._told_s = 0.0
        self._plan = _told(decision)
        self._proof = self._uncompiled = self._loop = self._tried = ""
        if self._plan:
            NodeText().say(self._plan)

    def proved(self, proof: Proof) -> None:
        """A plan that was not proven is told at once, and under each step."""
        if proof.verdict == NOT_PROVEN:
            self._proof = proof.text
            NodeText().say(self._proof)

    def fell_back(self, decision: Decision, why: str) -> None:
        """Told at once, and under each step."""
        self._plan, self._proof = decision.plan.name, why
        NodeText().say(why)

    def trying(self, text: str) -> None:
        """Told at once."""
        NodeText().say(text)

    def tried(self, decision: Decision, line: str) -> None:
        """Told at once, and under each step."""
        self._plan, self._tried = _told(decision), line
        NodeText().say(line)

    def loop_stays(self, reason: str) -> None:
        """Told at once, and under each step."""
        self._loop = f"The loop stays in ComfyUI: {reason}"
        NodeText().say(self._loop)

    def request(self, wall_s: float, ranks: Sequence[StepReply]) -> None:
        """One exchange with the workers: `step 7/20 · 0.41 s · 4 ranks · skew 3 %`; nothing where no run samples."""
        ends = [rank.ran.began_s + rank.ran.step_s for rank in ranks if rank.ran is not None]
        known = len(ends) > 1 and wall_s > 0
        self._tell(wall_s, len(ends), f"skew {(max(ends) - min(ends)) / wall_s * 100:.0f} %" if known else "")

    def compiling(self) -> None:
        """The workers make graphs of the blocks, which may take a minute; said at most every `INTERVAL_S`."""
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + INTERVAL_S
            NodeText().say("compiling the blocks; the next steps do without")

    def uncompiled(self, why: str) -> None:
        """Told at once, and under each step."""
        self._uncompiled = "\n".join(filter(None, (self._uncompiled, why)))
        NodeText().say(why)

    def drained(self, why: str) -> None:
        """Told once the run is over, when it is known."""
        NodeText().say(why)

    def worker_loop_began(self) -> None:
        """A loop inside the workers begins: its first step counts from here."""
        self._told_s = time.perf_counter()

    def worker_loop_step(self, num_ranks: int) -> None:
        """A step of a loop inside the workers, whose ranks report at its end."""
        began_s, self._told_s = self._told_s, time.perf_counter()
        self._tell(self._told_s - began_s, num_ranks, "")

    def _tell(self, wall_s: float, num_ranks: int, more: str) -> None:
        """ComfyUI's progress bar knows how many steps there are; the one that ends now is not counted in it yet."""
        context = executing()
        progress = None if context is None else get_progress_state().nodes.get(context.node_id)
        if progress is None or progress["max"] <= 1:
            return
        step, steps = min(int(progress["value"]) + 1, int(progress["max"])), int(progress["max"])
        now_s = time.monotonic()
        if now_s < self._next_s and step < steps:
            return
        self._next_s = now_s + INTERVAL_S
        took = f"{wall_s:.2f} s" if wall_s >= 0.1 else f"{wall_s * 1000:.0f} ms"
        ranks = f"{num_ranks} rank{'s' if num_ranks != 1 else ''}"
        line = " · ".join(word for word in (f"step {step}/{steps}", took, ranks, more) if word)
        told = (line, self._plan, self._tried, self._proof, self._uncompiled, self._loop)
        NodeText().say("\n".join(filter(None, told)))


def _told(decision: Decision) -> str:
    """Auto's plan of a run in a line; "" for a given one."""
    return f"{decision.plan.name}, chosen for {decision.chosen_for}" if decision.chosen_for else ""
