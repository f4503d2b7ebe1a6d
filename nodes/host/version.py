"""Whether the pack can run in this ComfyUI, in words for its log.

Owns the oldest version and the messages. Imports nothing of ComfyUI but its version, so that it can answer in any.
"""

import functools
import logging
import re

OLDEST = (0, 24, 0)
"""The oldest ComfyUI that passed the tests of the nodes; pyproject.toml's `requires-comfyui` says the same."""

NEEDED = "Parallel DiT needs ComfyUI {}.{}.{} or newer".format(*OLDEST)
UPDATE = "update ComfyUI (git pull, then pip install -r requirements.txt, in its folder) and start it again"
OF_COMFYUI = ("comfy", "comfy_api", "comfy_execution", "folder_paths", "nodes", "server")

log = logging.getLogger(__name__)


@functools.cache
def warn_if_too_old() -> bool:
    """Whether this ComfyUI is too old; says so in its log, once. A version without numbers is given the chance."""
    found = comfyui_version()
    numbers = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", found or "0.0")
    if numbers is None or tuple(int(number or 0) for number in numbers.groups()) >= OLDEST:
        return False
    log.error("%s, this is %s; its nodes are left out: %s", NEEDED, found or "a ComfyUI without a version", UPDATE)
    return True


def what_is_missing(error: ImportError | AttributeError) -> str:
    """One line about why the nodes could not be imported: a package of ours, or something of ComfyUI's."""
    missing = (error.name or "").split(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if missing and missing not in OF_COMFYUI:
        return f"Parallel DiT needs the package {missing}; pip install -r requirements.txt in its folder"
    return f"{NEEDED}, this is {comfyui_version()} and lacks something ({error}); update this pack, or {UPDATE}"


def comfyui_version() -> str | None:
    """The version as ComfyUI writes it; None for one from before it wrote any."""
    try:
        from comfyui_version import __version__
    except ModuleNotFoundError:
        return None
    return __version__
