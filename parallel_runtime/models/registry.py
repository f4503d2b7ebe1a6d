"""Which family a file holds, by its header: the one place that knows them all by name.

Owns the choice between families whose blocks are ours (family.py says what each must say) and ComfyUI's own
modules, which compute every other file. Imports no ComfyUI.
"""

from ..checkpoint import FP8, CheckpointHeader
from .family import Family, OwnModel
from .flux.family import FLUX

OWN: tuple[Family, ...] = (FLUX,)
# Of which plans are shown before a model is known, and whose small sample the doctor tries.
USUAL: Family = FLUX


def find_family(header: CheckpointHeader, *, comfyui: bool = False) -> Family | None:
    """The family whose blocks of ours compute this file; None: ComfyUI's own modules do, if it knows the file.

    `comfyui`: they are at hand. Then they compute all models in fp8: blocks of ours widen such weights in every step,
    ComfyUI's layers multiply in fp8 where the device can.
    """
    family = next((family for family in OWN if family.recognises(header)), None)
    if family is not None and comfyui:
        weights = family.weights(header).values()
        return None if any(entry.dtype in FP8.values() for entry in weights) else family
    return family


def read_own(header: CheckpointHeader) -> OwnModel:
    """The model in a file of such a family. Raises `ValueError` for a file that is none, or cannot be read."""
    return (find_family(header) or USUAL).read(header)


def titles() -> str:
    """The families whose blocks are ours, as users know them."""
    return ", ".join(family.title for family in OWN)
