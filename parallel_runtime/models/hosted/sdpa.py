"""Which of torch's kernels attends where ComfyUI's attention function is torch's: the order in which they are tried.

ComfyUI has a list of them, from the first to the last, where it sets one; without a list torch chooses. Owns the change
of that list by the device, and asking torch which kernel it takes. Imports nothing of ComfyUI: it is given `comfy.ops`.
"""

from contextlib import nullcontext
from types import ModuleType

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...choices import choice_for

ORDER = "SDPA_BACKEND_PRIORITY"
NAMES = {
    "CUDNN_ATTENTION": "cuDNN's attention",
    "FLASH_ATTENTION": "flash attention",
    "EFFICIENT_ATTENTION": "memory-efficient attention",
    "MATH": "matrix products and a softmax",
}
BACKENDS = {"cudnn": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION"}


def put_first(ops: ModuleType, capability: tuple[int, int] | None) -> None:
    """Move what the table of choices has for a compute capability to the front of ComfyUI's list, in place.

    Nothing changes where the table leaves ComfyUI's order (choices.py), where ComfyUI has no list, and where it has one
    without that kernel. `capability` None: a CPU.
    """
    order, first = vars(ops).get(ORDER), BACKENDS.get(choice_for(capability).sdpa_first, "")
    if not isinstance(order, list):
        return
    order.sort(key=lambda each: each.name != first)  # stable: the others keep their order


def backend_of(ops: ModuleType, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> str:
    """The kernel that torch takes for q (B, heads, S, D), k and v (B, heads of keys, T, D), in words; "" if unknown."""
    order = vars(ops).get(ORDER)
    grouped = q.shape[1] != k.shape[1]
    try:
        with sdpa_kernel(order, set_priority=True) if order else nullcontext():
            number = torch._fused_sdp_choice(q, k, v, mask, 0.0, False, enable_gqa=grouped)
        return NAMES[SDPBackend(number).name]
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):  # what torch does not promise
        return ""
