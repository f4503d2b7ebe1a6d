"""Run one diffusion transformer over several devices, without importing ComfyUI.

The folders, from the caller down: `pool` (the parent's side), `wire` (what passes between the sides), `worker` (one
rank), `weights` (what a rank holds of a model), `models` (the models, and what must be known of them), `parallel`
(which rank holds which tokens, and how ranks attend). Nothing but the standard library is imported here, so that a
worker can answer before it imports torch.
"""

import re
from pathlib import Path

VERSION = "0.2.0"
"""The pack's version, which pyproject.toml says too. Parent and ranks must be of one version."""


def installed_version() -> str:
    """The version in the pack's folder now: another than `VERSION` when the pack was updated since it was imported."""
    try:
        text = Path(__file__).read_text(encoding="utf-8")
    except OSError:
        text = ""
    found = re.search(r'^VERSION = "(.+)"$', text, flags=re.MULTILINE)
    return found[1] if found else "none"
