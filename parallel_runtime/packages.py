"""Which packages that change what a model computes a process has: their versions and where they lie.

Owns the list of their names, and the words for a difference between ComfyUI's process and a rank. Imports none of them.
"""

import importlib.util
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import DistributionFinder, MetadataPathFinder
from pathlib import Path
from typing import NamedTuple

# Matrix products, attention and number formats are theirs.
ARITHMETIC = (
    *("torch", "triton", "comfy_kitchen", "comfy_aimdo", "sageattention", "sageattn3", "flash_attn", "xformers"),
    *("torchao", "torchsde", "einops", "numpy"),
)


class Package(NamedTuple):
    """A package that a process has: its version, "" where the folder does not say it, and where it lies."""

    name: str
    version: str
    folder: str

    def __str__(self) -> str:
        return f"{self.name} {self.version or 'without a version'}"


def imported_packages() -> tuple[Package, ...]:
    """Those that this process has imported."""
    found = (_found(name) for name in ARITHMETIC if name in sys.modules)
    return tuple(each for each in found if each is not None)


def differences(theirs: Iterable[Package], *, elsewhere: bool) -> list[str]:
    """How packages that a rank has imported differ from those of this process, imported or not; a sentence for each.

    `elsewhere`: the rank is on another machine, where folders say nothing.
    """
    said = []
    for package in theirs:
        ours = _found(package.name)
        if ours is None:
            said.append(f"workers have {package}, and ComfyUI has no {package.name}; {_remedy(elsewhere)}")
        elif ours.version != package.version:
            said.append(f"workers have {package}, and ComfyUI has {ours}; {_remedy(elsewhere)}")
        elif not elsewhere and ours.folder != package.folder:
            said.append(f"workers have another copy of {package} than ComfyUI; {_remedy(elsewhere)}")
    return said


def _remedy(elsewhere: bool) -> str:
    if elsewhere:
        return "install ComfyUI's requirements on both machines in the same versions"
    return "leave one of the two installed, or name its folder in PYTHONPATH before you start ComfyUI"


def _found(name: str) -> Package | None:
    """As this process has it, else as it would import it; None where it would find none."""
    module = sys.modules.get(name)
    places: Sequence[str] = list(getattr(module, "__path__", ()))
    if not places:
        try:
            spec = importlib.util.find_spec(name) if module is None else None
        except (ImportError, ValueError):
            spec = None
        places = list((spec and spec.submodule_search_locations) or ())
    if not places:
        return None
    folder = str(Path(places[0]).resolve().parent)
    return Package(name, _version(name, folder), folder)


def _version(name: str, folder: str) -> str:
    """As the installer wrote it next to the package."""
    context = DistributionFinder.Context(name=name, path=[folder])
    return next((found.version for found in MetadataPathFinder.find_distributions(context)), "")
