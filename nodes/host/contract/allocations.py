"""What newer ComfyUIs' compiler records of a forward: what its thread allocates on a GPU.

Such an allocation must not outlive the block that made it, or the process ends. A record belongs to a thread, by its
number. Owns what this pack keeps out of records; under --disable-comfy-compiler there are none.
"""

from contextlib import AbstractContextManager, nullcontext

import torch

from .comfyui import comfy, is_absent


def is_recorded(device: torch.device) -> bool:
    """Whether a forward on this device may have its allocations recorded."""
    enabled = comfy.model_prefetch.malloc_graph_enabled
    return not is_absent(enabled) and bool(enabled(device))


def unrecorded() -> AbstractContextManager[object]:
    """Inside, nothing is recorded."""
    pause = comfy.model_prefetch.pause_malloc_graph
    found: AbstractContextManager[object] = nullcontext() if is_absent(pause) else pause()
    return found


def forget_records() -> None:
    """Have ComfyUI forget the record of this thread, an open one too. A later thread of its number would get it."""
    forget = comfy.model_prefetch.cleanup_malloc_graph
    if not is_absent(forget):
        forget()
