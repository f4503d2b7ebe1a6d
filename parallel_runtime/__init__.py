"""Run one diffusion transformer over several devices, without importing ComfyUI.

The folders, from the caller down: `pool` (the parent's side), `wire` (what passes between the sides), `worker` (one
rank), `weights` (what a rank holds of a model), `models` (the models, and what must be known of them), `parallel`
(which rank holds which tokens, and how ranks attend). Nothing but the standard library is imported here, so that a
worker can answer before it imports torch.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

VERSION = "0.2.0"
"""The pack's version, which pyproject.toml says too. Parent and ranks must be of one version."""


def pack_folder(environ: Mapping[str, str]) -> Path:
    """The pack's folder; where the shell came to it by a link, as in the custom_nodes of a ComfyUI, by that path.

    One that Python imported by a link is there already: what imported it may stand anywhere.
    """
    folder, there = Path(__file__).absolute().parents[1], Path(environ.get("PWD", ""))
    if folder != folder.resolve():
        return folder
    return there if there.is_absolute() and os.path.exists(there) and there.samefile(folder) else folder


def installed_version() -> str:
    """The version in the pack's folder now: another than `VERSION` when the pack was updated since it was imported."""
    try:
        text = Path(__file__).read_text(encoding="utf-8")
    except OSError:
        text = ""
    found = re.search(r'^VERSION = "(.+)"$', text, flags=re.MULTILINE)
    return found[1] if found else "none"
