"""Which of the pack's features this ComfyUI can have, in words for its log, the panel and the nodes.

Owns that the host contract is looked at once, when the pack is loaded, and what is said then. What is relied on, and
the words, are `parallel_runtime/models/hosted/contract.py`'s. Imports nothing of ComfyUI but its version, so that it
can answer in any.
"""

import functools
import importlib
import logging

from ....parallel_runtime.devices import missing_system
from ....parallel_runtime.models.hosted.contract import FEATURES, LINES, OLDEST
from ....parallel_runtime.models.hosted.contract_check import (
    UPDATE_COMFYUI,
    UPDATE_PACK,
    MissingInComfyUIError,
    is_older,
    look,
    newer_than_tested,
    off_by_feature,
    sentence,
)
from ....parallel_runtime.proof import ProofStore

WITHOUT = "without a version"
NEEDED = "Parallel DiT needs ComfyUI {}.{}.{} or newer".format(*OLDEST)
OF_COMFYUI = ("comfy", "comfy_api", "comfy_execution", "execution", "folder_paths", "latent_preview", "nodes", "server")

log = logging.getLogger(__name__)


@functools.cache
def why_no_nodes() -> str:
    """Why the nodes can only say why they do not run, a line that is logged once; "" where they are there."""
    found, reason = comfyui_version(), off("nodes")
    if is_older(found):
        reason = f"{NEEDED}, this is {found or 'a ComfyUI without a version'}; {UPDATE_COMFYUI}"
    if not reason:
        try:
            importlib.import_module(f"{__package__.rsplit('.', 2)[0]}.extension")
        except Exception as error:  # noqa: BLE001  any code of ComfyUI's that an import runs
            reason = what_is_missing(error)
    if reason:
        log.error(reason)
    return reason


def what_is_missing(error: Exception) -> str:
    """One line about why the nodes could not be imported: a package that this pack needs, or a name of ComfyUI's."""
    missing = (error.name or "").split(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if missing and missing not in OF_COMFYUI:
        return f"Parallel DiT needs the package {missing}; pip install -r requirements.txt in its folder"
    return f"{NEEDED}, this is {comfyui_version()} and lacks something ({error}); {UPDATE_PACK}, or {UPDATE_COMFYUI}"


@functools.cache
def features_off() -> dict[str, str]:
    """The features that this ComfyUI cannot have, each with the sentence that says why."""
    return off_by_feature(look(), comfyui_version())


def off(feature: str) -> str:
    """Why a feature is off, a sentence; "" where it is not."""
    return features_off().get(feature, "")


def refuse_off(*features: str) -> None:
    """Raise `ValueError` with the sentence of the first of these features that is off."""
    for feature in features:
        if off(feature):
            raise MissingInComfyUIError(off(feature))


def said_of(name: str) -> str:
    """The sentence about a name that ComfyUI lacks."""
    lines = [line for line in LINES if f"{name}.".startswith(f"{line.name}.")]
    line = next((each for each in lines if off(each.feature)), None)
    if line is not None:
        return off(line.feature)
    feature = lines[0].feature if lines else next(iter(FEATURES))
    return sentence(feature, lines[:1], comfyui_version()) if lines else f"ComfyUI has no `{name}`; {UPDATE_PACK}"


def tell_at_load() -> None:
    """Say in the log which features are off, and that this ComfyUI is newer than those tested."""
    for text in (*features_off().values(), *filter(None, [newer()])):
        log.warning(text)


def newer() -> str:
    """What is said of a ComfyUI that is newer than the newest tested, with what is proven there; "" for others."""
    return newer_than_tested(comfyui_version(), ProofStore.of_user())


def told_of_comfyui() -> dict[str, object]:
    """For the panel: the version, and a sentence for each thing that a user has to know of it."""
    return {
        "version": comfyui_version() or "",
        "notes": [*filter(None, [missing_system(), newer()]), *features_off().values()],
    }


def comfyui_version() -> str | None:
    """The version as ComfyUI writes it, "without a version" where that is no more; None for one from before it did."""
    try:
        module = importlib.import_module("comfyui_version")
    except ImportError:
        return None
    return str(getattr(module, "__version__", None) or WITHOUT)
