"""A node by which a run stays after each step until a test lets it go on."""

import time
from pathlib import Path
from typing import Any

import comfy.model_management
from comfy_api.latest import io
from comfy_execution.progress import ProgressHandler, get_progress_state

from .node import node

LOOK_S = 0.02


class Hold(ProgressHandler):
    """Has what tells of step N wait for a file, GATE.N or GATE itself, in either loop; cancelled as any node.

    heeds_cancel: False where the test is of who else heeds it.
    """

    def __init__(self, gate: Path, heeds_cancel: bool) -> None:
        super().__init__("hold")
        self.gate, self.heeds_cancel = gate, heeds_cancel

    def update_handler(self, node_id: str, value: float, *_: Any, **__: Any) -> None:
        """Called by the thread that samples, after each step."""
        while not (self.gate.exists() or self.gate.with_suffix(f".{value:.0f}").exists()):
            if self.heeds_cancel:
                comfy.model_management.throw_exception_if_processing_interrupted()
            time.sleep(LOOK_S)


@node("HoldSteps", gives=[io.Model])
def hold_steps(model: io.Model, gate: str, heeds_cancel: bool = True) -> io.NodeOutput:
    """The MODEL; steps of this prompt that come after wait."""
    get_progress_state().register_handler(Hold(Path(gate), heeds_cancel))
    return io.NodeOutput(model)
