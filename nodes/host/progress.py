"""Starting and loading, told on the node that waits for it. Text, not the bar: its events count sampling steps."""

import time

from comfy_api.latest import get_executing_context
from server import PromptServer

INTERVAL_S = 0.2


def prompt_id() -> str:
    """ComfyUI's id of the prompt that executes now; "" outside of one."""
    context = get_executing_context()
    return "" if context is None else context.prompt_id


class NodeText:
    """Writes on the node that executes now; nowhere when none does."""

    def __init__(self) -> None:
        context = get_executing_context()
        self._node_id = None if context is None else context.node_id
        self._next_s = 0.0

    def say(self, text: str) -> None:
        """Show `text` in place of what was shown."""
        if self._node_id is not None:
            PromptServer.instance.send_progress_text(text, self._node_id)

    def loading(self, name: str, loaded_bytes: int, total_bytes: int) -> None:
        """One report of the pool's `load`, counted over all ranks; shown at most every `INTERVAL_S`."""
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + INTERVAL_S
            self.say(f"Loading {name}: {loaded_bytes / 1e9:.2f} of {total_bytes / 1e9:.2f} GB")


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
