"""Which of torch's kernels attends where ComfyUI's attention function is torch's: the order in which they are tried.

ComfyUI has a list of them, from the first to the last, where it sets one; without a list torch chooses. Owns the change
of that list by the device, its end where the kernel that was moved fails, and asking torch which kernel it takes. Which
kernel a rank takes is its own affair: no exchange depends on it. Imports nothing of ComfyUI: it is given `comfy.ops`.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...choices import CardChoice

log = logging.getLogger(__name__)
ORDER = "SDPA_BACKEND_PRIORITY"
NAMES = {
    "CUDNN_ATTENTION": "cuDNN's attention",
    "FLASH_ATTENTION": "flash attention",
    "EFFICIENT_ATTENTION": "memory-efficient attention",
    "MATH": "matrix products and a softmax",
}
BACKENDS = {"cudnn": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION"}


class Moved(NamedTuple):
    """ComfyUI's list, and what it had in it before a kernel was moved to its front."""

    order: list[SDPBackend]
    stocks: list[SDPBackend]


_MOVED: list[Moved] = []  # of this process: one or none
_FAILED: list[str] = []  # what was moved and is in its place again


def put_first(ops: ModuleType, chosen: CardChoice) -> None:
    """Move what was chosen for a device to the front of ComfyUI's list, in place.

    Nothing changes where the table leaves ComfyUI's order (choices.py), where ComfyUI has no list, and where it has one
    without that kernel.
    """
    order, first = vars(ops).get(ORDER), BACKENDS.get(chosen.sdpa_first, "")
    if not isinstance(order, list):
        return
    stocks = list(order)
    order.sort(key=lambda each: each.name != first)  # stable: the others keep their order
    if order != stocks:
        _MOVED[:] = [Moved(order, stocks)]


def try_first(device: torch.device) -> None:
    """A little attention in both halves by the kernel that was moved; where it raises, ComfyUI's own order is back."""
    for dtype in (torch.bfloat16, torch.float16):
        if not is_moved():
            return
        q = torch.zeros(1, 2, 128, 64, dtype=dtype, device=device)
        try:
            with sdpa_kernel(_MOVED[0].order[0]):
                F.scaled_dot_product_attention(q, q, q)
        except torch.OutOfMemoryError:
            return
        except RuntimeError as error:
            with in_stocks_order(error):
                pass


def is_moved() -> bool:
    """Whether a kernel stands first because of us."""
    return bool(_MOVED)


@contextmanager
def in_stocks_order(error: RuntimeError) -> Iterator[None]:
    """ComfyUI's own order, inside and from now on, after attention with the moved kernel raised `error`; the log says
    so. What raises inside as well was not that kernel's: the kernel stays first then."""
    order, stocks = moved = _MOVED.pop()
    ours = list(order)
    order[:] = stocks
    try:
        yield
    except BaseException:
        order[:] = ours
        _MOVED.append(moved)
        raise
    _FAILED[:] = [NAMES.get(ours[0].name, ours[0].name)]
    why = str(error).partition("\n")[0]
    log.warning("%s failed; this worker keeps ComfyUI's own order of kernels: %s", _FAILED[0], why)


def failed() -> str:
    """For what names the kernel that attends: which one was to, and failed; "" where none did."""
    return f" ({_FAILED[0]} failed)" if _FAILED else ""


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
