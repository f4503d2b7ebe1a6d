"""Loading, told on the node that waits for it. Text, not the progress bar: the bar's events count sampling steps."""

import time

from comfy_api.latest import get_executing_context
from server import PromptServer

INTERVAL_S = 0.2


class LoadingText:
    """Called with bytes loaded and in total; writes at most every `INTERVAL_S` on the executing node."""

    def __init__(self, name: str) -> None:
        context = get_executing_context()
        self._node_id = None if context is None else context.node_id
        self._name = name
        self._next_s = 0.0

    def __call__(self, loaded_bytes: int, total_bytes: int) -> None:
        """One report of the pool's `load`."""
        now_s = time.monotonic()
        done = loaded_bytes >= total_bytes
        if self._node_id is None or (now_s < self._next_s and not done):
            return
        self._next_s = now_s + INTERVAL_S
        text = f"Loading {self._name}: {loaded_bytes / 1e9:.2f} of {total_bytes / 1e9:.2f} GB"
        PromptServer.instance.send_progress_text(text, self._node_id)
