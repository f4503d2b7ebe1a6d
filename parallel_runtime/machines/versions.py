"""What must be equal on all machines, and the words for what is not."""

from .. import VERSION
from .messages import Versions

WORDS = {
    "pack": ("Parallel DiT", "update this pack on both machines to one version, and start ComfyUI and `join` again"),
    "torch": ("torch", "install the same torch on both machines, and start ComfyUI and `join` again"),
    "comfyui": ("ComfyUI", "update ComfyUI on both machines to one version, and start it and `join` again"),
    "nccl": ("NCCL", "install the same torch on both machines, which brings its NCCL"),
}


def own_versions(comfyui: str) -> Versions:
    """Of this process; `comfyui` is its ComfyUI's, "" for none. Imports torch."""
    import torch

    nccl = torch.distributed.is_nccl_available() and torch.cuda.is_available()
    return Versions(
        pack=VERSION,
        torch=torch.__version__,
        comfyui=comfyui,
        nccl=".".join(map(str, torch.cuda.nccl.version())) if nccl else "",
    )


def difference(ours: Versions, theirs: Versions) -> str:
    """What differs and what to do, "" where nothing does. Builds of one torch for other devices are one version."""
    for name, (title, remedy) in WORDS.items():
        here, there = getattr(ours, name), getattr(theirs, name)
        if name == "torch":
            here, there = here.partition("+")[0], there.partition("+")[0]
        if here != there and (here and there or name in ("pack", "torch")):
            return f"{title} is {there or 'missing'} there and {here or 'missing'} beside ComfyUI; {remedy}"
    return ""
