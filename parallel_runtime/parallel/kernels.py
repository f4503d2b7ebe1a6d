"""Attention on one device: one function for the whole softmax, one that also returns its log-sum-exp.

Letters: `B` batch, `S` query tokens, `T` key tokens, `H` heads, `D` head size. Layout is (B, S, H, D) throughout. A
mask (B or 1, S, T) is added to the scores; `additive_mask` makes one.
Owns the choice of torch's kernels, what becomes of one that fails, and the empty cases that crash or poison them. Knows
no rank.
"""

import functools
import logging
import math
from collections.abc import Callable, Collection
from enum import Enum

import torch
import torch.nn.functional as F

from ..choices import choice_for

log = logging.getLogger(__name__)
aten = torch.ops.aten
# A score this low has no weight in any softmax. Minus infinity would make a part that is masked whole NaN.
MASKED = -3e4
AMPERE = (8, 0)  # the compute capability from which there are flash attention and bf16 matrix units
HALVES = (torch.float16, torch.bfloat16)
MULTIPLE = 8  # of which a fused CUDA kernel wants the head size; torch's front end pads, its kernels do not
FLASH_HEAD, CUDNN_HEAD = 256, 128  # the largest head sizes that flash attention and cuDNN's attention always take


class Kernel(Enum):
    """What computes attention. All but `DISPATCHED` return the log-sum-exp."""

    DISPATCHED = "scaled_dot_product_attention"  # torch chooses, which it does well but for bf16 before Ampere
    CPU = "flash attention for the CPU"
    CUDNN = "cuDNN's attention"
    FLASH = "flash attention"
    EFFICIENT = "memory-efficient attention"
    EFFICIENT_FP32 = "memory-efficient attention in fp32"
    FORMULA = "matrix products and a softmax"


OF_CHOICE = {"cudnn": Kernel.CUDNN, "flash": Kernel.FLASH, "efficient": Kernel.EFFICIENT}
_FAILED: set[tuple[Kernel, torch.dtype, int]] = set()  # of this process: it raised for this dtype and head size
ATTENDED: set[str] = set()  # what has attended in this process since a run began and can be named, for its report


def choose_kernel(
    dtype: torch.dtype,
    *,
    capability: tuple[int, int] | None,
    with_lse: bool,
    masked: bool,
    head_dim: int,
    failed: Collection[Kernel] = (),
) -> Kernel:
    """The kernel for a device of a compute capability, None for a CPU; none of those that `failed`.

    Which is quickest with a log-sum-exp is the table's to say (choices.py). Flash attention and cuDNN's take halves, no
    mask, and Ampere or newer. The memory-efficient kernel takes fp16 and fp32 on every device, and bf16 from Ampere on;
    before, torch's own choice for bf16 is to keep all S * T scores in memory.
    """
    if capability is None:
        return Kernel.CPU if with_lse else Kernel.DISPATCHED
    emulated = dtype == torch.bfloat16 and capability < AMPERE
    if not with_lse and not emulated:
        return Kernel.DISPATCHED
    if head_dim % MULTIPLE or dtype not in (*HALVES, torch.float32):
        return Kernel.FORMULA if with_lse else Kernel.DISPATCHED
    if emulated:
        return Kernel.EFFICIENT_FP32
    fused = dtype in HALVES and capability >= AMPERE and not masked
    fits = {Kernel.CUDNN: fused and head_dim <= CUDNN_HEAD, Kernel.FLASH: fused and head_dim <= FLASH_HEAD}
    first = OF_CHOICE[choice_for(None if torch.version.hip else capability).ring_kernel]  # AMD's name other cards
    candidates = (first, Kernel.FLASH, Kernel.EFFICIENT)
    return next((each for each in candidates if fits.get(each, True) and each not in failed), Kernel.FORMULA)


def additive_mask(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask as it is added to the scores: True (attend) and False, or values to add, to finite values of `dtype`."""
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, MASKED)
    return mask.to(dtype).clamp(min=MASKED)


def one_row(mask: torch.Tensor) -> torch.Tensor:
    """A mask (B or 1, S, T); where it is one row that was expanded to S, that row (B or 1, 1, T).

    What torch computes of an expanded tensor holds all S rows.
    """
    return mask if mask.stride(1) else mask[:, :1]


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Softmax attention. q (B, S, H, D), k and v (B, T, H, D) with T > 0; returns (B, S, H, D)."""
    if q.shape[1] == 0:
        return q
    heads_first = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    kernel = _kernel_for(q, None, with_lse=False)
    if kernel is not Kernel.DISPATCHED:
        return _WITH_LSE[kernel](*heads_first, None)[0].transpose(1, 2)
    return F.scaled_dot_product_attention(*heads_first).transpose(1, 2)


def attention_with_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over a part of the keys. S and T must be above zero: torch's CPU kernel dies on empty input.

    Returns out (B, S, H, D) and the log-sum-exp of the scores (B, S, H, 1) in fp32, with which parts are merged. A
    kernel that raises is said so in the log and not called again in this process for this dtype and head size; another
    one takes its place. Raises `RuntimeError` when there is none, and out of memory as it comes.
    """
    heads_first = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    while True:
        kernel = _kernel_for(q, mask, with_lse=True)
        try:
            out, lse = _WITH_LSE[kernel](*heads_first, mask)
            lse = lse.to(torch.float32)
            if torch.version.hip is not None:
                lse = lse * log_base(kernel, q.dtype, q.device)
        except torch.OutOfMemoryError:
            raise
        except (AttributeError, RuntimeError, TypeError) as error:  # torch lacks it, it refuses, it has other arguments
            if kernel not in OF_CHOICE.values():
                raise
            _FAILED.add((kernel, q.dtype, q.shape[-1]))
            log_failure(kernel.value, q, error)
        else:
            ATTENDED.add(kernel.value)
            return out.transpose(1, 2), lse.transpose(1, 2).unsqueeze(-1)


@functools.cache
def log_base(kernel: Kernel, dtype: torch.dtype, device: torch.device) -> float:
    """What makes the log-sum-exp of a kernel of AMD's one to base e.

    It has base 2 before AOTriton 0.11, which torch has from 2.9 on, and AMD's own builds of older ones may have
    (PyTorch issue 156012): so it is looked at. Raises `RuntimeError` for a kernel whose log-sum-exp is neither.
    """
    head_dim = 64
    ones = torch.ones(1, 1, 1, head_dim, dtype=dtype, device=device)
    found = float(_WITH_LSE[kernel](ones, ones, ones, None)[1].flatten()[0])  # of one key: the score
    for base in (1.0, math.log(2)):
        if math.isclose(found * base, math.sqrt(head_dim), rel_tol=0.01):
            return base
    raise RuntimeError(f"the log-sum-exp of one key is {found:.4g}, and has to be {math.sqrt(head_dim):.4g}")


def log_failure(kernel: str, q: torch.Tensor, error: Exception) -> None:
    """Say that a kernel of this name is no longer called for the dtype and the head size of q (..., D)."""
    why = str(error).partition("\n")[0] or type(error).__name__
    log.warning("%s failed and is not used again for heads of %d in %s: %s", kernel, q.shape[-1], q.dtype, why)


def _kernel_for(q: torch.Tensor, mask: torch.Tensor | None, *, with_lse: bool) -> Kernel:
    capability = torch.cuda.get_device_capability(q.device) if q.device.type == "cuda" else None
    return choose_kernel(
        q.dtype,
        capability=capability,
        with_lse=with_lse,
        masked=mask is not None,
        head_dim=q.shape[-1],
        failed=[kernel for kernel, dtype, size in _FAILED if (dtype, size) == (q.dtype, q.shape[-1])],
    )


# Each takes q (B, H, S, D), k and v (B, H, T, D) and a mask or None; returns (B, H, S, D) and (B, H, S).


def _cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    bias = None if mask is None else mask[:, None]
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, attn_mask=bias)[:2]
    return out, lse


def _cudnn(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if mask is not None:
        raise ValueError("cuDNN's attention is given no mask; choose_kernel never gives it one")
    out, lse = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True)[:2]
    return out, lse.reshape(out.shape[:3])  # (B, H, S, 1)


def _flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if mask is not None:
        raise ValueError("flash attention takes no mask; choose_kernel never gives it one")
    out, lse = aten._scaled_dot_product_flash_attention(q, k, v)[:2]
    return out, lse


def _efficient(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    bias = None if mask is None else _aligned_bias(mask, q)
    out, lse = aten._scaled_dot_product_efficient_attention(q, k, v, bias, True)[:2]
    return out, lse[:, :, : q.shape[2]]  # the kernel pads the queries to a multiple of 32


def _efficient_fp32(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = _efficient(q.float(), k.float(), v.float(), mask)
    return out.to(q.dtype), lse


def _formula(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """In fp32 at least, with all S * T scores in memory."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(dtype) * q.shape[-1] ** -0.5) @ k.to(dtype).transpose(-1, -2)
    if mask is not None:
        scores += mask[:, None]
    lse = scores.logsumexp(-1)
    return ((scores - lse.unsqueeze(-1)).exp_() @ v.to(dtype)).to(q.dtype), lse


_WITH_LSE: dict[
    Kernel,
    Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]],
] = {
    Kernel.CPU: _cpu,
    Kernel.CUDNN: _cudnn,
    Kernel.FLASH: _flash,
    Kernel.EFFICIENT: _efficient,
    Kernel.EFFICIENT_FP32: _efficient_fp32,
    Kernel.FORMULA: _formula,
}


def _aligned_bias(mask: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """(B or 1, S, T) to (B, H, S, T) for q (B, H, S, D), in its dtype, with rows that start at multiples of 16 bytes,
    as the kernel wants them. `pad` copies its rows also where there is nothing to add."""
    keys = mask.shape[-1]
    padded = F.pad(one_row(mask).to(q.dtype), (0, -keys % 8))[..., :keys]
    return padded[:, None].expand(*q.shape[:3], -1)


def merge(
    out: torch.Tensor, lse: torch.Tensor, part_out: torch.Tensor, part_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fold one more part into a running result, in fp32 and in place.

    out, part_out (B, S, H, D); lse, part_lse (B, S, H, 1). Source: Ring Attention (arXiv 2310.01889), the update
    written as one interpolation with weight sigmoid(part_lse - lse), as in zhuzilin/ring-flash-attention PR 34.
    """
    # In fp32 torch's CPU functions round an element by its place in memory: with other heads next to it, other bits.
    dtype = torch.float64 if lse.device.type == "cpu" else torch.float32
    ours, part = lse.to(dtype), part_lse.to(dtype)
    out.lerp_(part_out.to(torch.float32), torch.sigmoid(part - ours).to(torch.float32))
    # Not lse - logsigmoid(lse - part_lse): after a part that is masked whole, that loses three digits.
    return out, torch.logaddexp(ours, part).to(torch.float32)
