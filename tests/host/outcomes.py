"""What a test raises where there is nothing to compare; tally.py counts it apart, any other run of the tests fails."""

import json
from pathlib import Path

RELEASED = Path(__file__).resolve().parents[1] / "comfy" / "released_nodes.json"
OURS = frozenset(json.loads(RELEASED.read_text(encoding="utf-8")))  # nodes that no ComfyUI may lack


class StockFailsError(RuntimeError):
    """Stock ComfyUI itself does not do what a test needs; the text says what it said."""


class RefusedError(RuntimeError):
    """The pack refuses by name what a test asks for; the text is what the user reads."""
