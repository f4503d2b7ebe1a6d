"""Which of torch's kernels attends where ComfyUI's attention function is torch's: the order in which they are tried.

ComfyUI has a list of them, from the first to the last, where it sets one; without a list torch chooses. Owns the change
of that list by the device, the fallback where attention fails, and asking torch which kernel it takes. Which kernel a
rank takes is its own affair: no exchange depends on it. Imports nothing of ComfyUI: it is given `comfy.ops`.

The fallback is ComfyUI's own order without cuDNN's kernel, which may have no plan for tensors that lie as an exchange
leaves them, where ComfyUI's are contiguous.
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
CUDNN = "CUDNN_ATTENTION"
BACKENDS = {"cudnn": CUDNN, "flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION"}


class Fallback(NamedTuple):
    """ComfyUI's list, what it has in it once attention has failed, and the kernel that we moved first, if any."""

    order: list[SDPBackend]
    then: list[SDPBackend]
    moved: str


_FALLBACK: list[Fallback] = []  # of this process: one or none
_FAILED: list[str] = []  # the kernel that failed


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
    then = [each for each in stocks if each.name != CUDNN]
    if then and order != then:
        _FALLBACK[:] = [Fallback(order, then, "" if order[0] in (stocks[0], then[0]) else order[0].name)]


def try_first(device: torch.device) -> None:
    """A little attention in both halves by the kernel that was moved; where it raises, the fallback stays."""
    for dtype in (torch.bfloat16, torch.float16):
        if not _FALLBACK or not _FALLBACK[0].moved:
            return
        q = torch.zeros(1, 2, 128, 64, dtype=dtype, device=device)
        try:
            with sdpa_kernel(_FALLBACK[0].order[0]):
                F.scaled_dot_product_attention(q, q, q)
        except torch.OutOfMemoryError:
            return
        except RuntimeError as error:
            with falling_back(error):
                pass


def may_fall_back() -> bool:
    """Whether there is another order for attention that fails. While a graph is recorded, that may be why it does."""
    return bool(_FALLBACK) and not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


@contextmanager
def falling_back(error: RuntimeError) -> Iterator[None]:
    """The fallback, inside and from now on, after attention raised `error`; the log says so. What raises inside as well
    was no kernel's that is left out or was moved: the order stays as it was then."""
    order, then, moved = fallback = _FALLBACK.pop()
    ours, name = list(order), moved or CUDNN
    order[:] = then
    try:
        yield
    except BaseException:
        order[:] = ours
        _FALLBACK.append(fallback)
        raise
    _FAILED[:] = [NAMES.get(name, name)]
    why = str(error).partition("\n")[0]
    log.warning("%s failed; this worker keeps ComfyUI's order of kernels without cuDNN's: %s", _FAILED[0], why)


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
