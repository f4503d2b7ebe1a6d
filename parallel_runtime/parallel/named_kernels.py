"""Attention kernels of packages, asked for by name: FlashAttention 3, SageAttention, FlashInfer, by `yunchang`.

Letters: `B` batch, `S` query tokens, `T` key tokens, `H` heads, `D` head size. Layout is (B, S, H, D).
`yunchang` has one call for all that returns the log-sum-exp with the output, which Ring needs. It is imported where one
of them is first used, in a rank, and required nowhere. Owns the names, what is missing for one, and what becomes of one
that fails. A call with a mask is `kernels.py`'s: none of these takes one.
"""

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch
import torch.nn.functional as F

from .kernels import ATTENDED, attention_with_lse, log_failure

AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class PackageKernel:
    """What a kernel needs to be there, and how it is called.

    `member`: of yunchang's `AttnType`; `package`: the module that has the kernel; `install`: how to get that; `least`:
    the first major version of the package that can be used, 0 where none is known.
    """

    member: str
    package: str
    install: str
    exact: bool
    takes: tuple[tuple[str, object], ...]  # what its call wants besides q, k, v and the scale
    scale: str = "softmax_scale"
    least: int = 0


_OF_FLASH = (
    *(("dropout_p", 0.0), ("causal", False), ("window_size", (-1, -1)), ("alibi_slopes", None)),
    ("return_softmax", False),
)
NAMED = {
    "FlashAttention 3": PackageKernel(
        member="FA3",
        package="flash_attn_interface",
        install="pip install yunchang, and FlashAttention 3 from the folder hopper of Dao-AILab/flash-attention",
        exact=True,
        takes=(*_OF_FLASH, ("softcap", 0.0)),
    ),
    "SageAttention": PackageKernel(
        member="SAGE_AUTO",
        package="sageattention",
        install="pip install yunchang, and SageAttention 2 from thu-ml/SageAttention; pip's 1.0.6 has no log-sum-exp",
        exact=False,
        takes=(("is_causal", False),),
        scale="sm_scale",
        least=2,
    ),
    "FlashInfer": PackageKernel(
        member="FLASHINFER",
        package="flashinfer",
        install="pip install yunchang flashinfer-python",
        exact=True,
        takes=(*_OF_FLASH, ("softcap", None)),
    ),
}
CHOICES = (AUTO, *NAMED)
_FAILED: set[tuple[str, torch.dtype, int]] = set()  # of this process: it raised for this dtype and head size


def missing(name: str) -> str:
    """What lacks for a kernel in this Python, with the remedy; "" where both packages are there and new enough.

    Imports neither: the version is what the package's metadata say, and one without metadata is new enough.
    """
    named = NAMED[name]
    lacking = [package for package in ("yunchang", named.package) if find_spec(package) is None]
    if lacking:
        return _refusal(name, f"this Python has no {' and no '.join(lacking)}")
    found = _version(named.package)
    major = re.match(r"\d+", found)
    if major and int(major[0]) < named.least:
        return _refusal(name, f"this Python has {named.package} {found}, and {named.least} or newer is needed")
    return ""


def _version(package: str) -> str:
    """What the metadata of a package say, "" where they say none."""
    try:
        return version(package) or ""
    except PackageNotFoundError:
        return ""


def _refusal(name: str, why: str) -> str:
    return f"attention={name}: {why}; {NAMED[name].install}, or set attention in SP Config to {AUTO}"


def described(name: str) -> str:
    """The name, and that it rounds where it does."""
    return name if NAMED[name].exact else f"{name}, which rounds"


def may_attend(name: str, *, exact: bool) -> bool:
    """Whether a kernel may compute a call, `exact` one whose model forbids rounding."""
    return NAMED[name].exact or not exact


@lru_cache
def _function(name: str) -> Callable[..., object]:
    """The call of yunchang's. Raises `ValueError` where a package is missing, or does not load, or does not have it."""
    if lacking := missing(name):
        raise ValueError(lacking)
    try:
        kernels = importlib.import_module("yunchang.kernels")
        function: Callable[..., object] = kernels.select_flash_attn_impl(
            getattr(kernels.AttnType, NAMED[name].member), stage="fwd-only"
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # packages compile and load libraries when they are imported
        raise ValueError(_refusal(name, f"this version of yunchang does not have it ({error})")) from error
    return function


def attention_by(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """q (B, S, H, D), k and v (B, T, H, D); returns out (B, S, H, D) and the log-sum-exp (B, S, H, 1) in fp32.

    None where the kernel raised for this dtype and head size, now or before, which the log says once. Raises
    `ValueError` where it is not there, or returns something else, and out of memory as it comes.
    """
    kind = name, q.dtype, q.shape[-1]
    if kind in _FAILED:
        return None
    named, function = NAMED[name], _function(name)
    options = {**dict(named.takes), named.scale: q.shape[-1] ** -0.5 if scale is None else scale}
    rows = q.shape[0] if named.member == "FLASHINFER" else 1  # it takes one image a call
    parts = list[tuple[torch.Tensor, torch.Tensor]]()
    for given in zip(*(each.contiguous().chunk(rows) for each in (q, k, v)), strict=True):
        try:
            found = function(*given, **options)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001  compilers and loaders raise classes of their own
            _FAILED.add(kind)
            log_failure(name, q, error)
            return None
        parts.append(_checked(name, found, given[0]))
    ATTENDED.add(described(name))
    out, lse = (torch.cat(each) for each in zip(*parts, strict=True))
    return out, lse


def _checked(name: str, found: object, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = found[:2] if isinstance(found, tuple | list) and len(found) > 1 else (None, None)
    batch, tokens, heads, _ = q.shape
    if not isinstance(out, torch.Tensor) or not isinstance(lse, torch.Tensor) or out.shape != q.shape:
        raise ValueError(_refusal(name, "this version returns no output with its log-sum-exp"))
    if lse.numel() != batch * heads * tokens:
        raise ValueError(_refusal(name, f"this version returns a log-sum-exp of shape {tuple(lse.shape)}"))
    return out, lse.reshape(batch, heads, tokens).float().transpose(1, 2).unsqueeze(-1)


def attend_with_lse(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `kernels.attention_with_lse`, by that kernel where it has a name, there is no mask, and it works."""
    found = attention_by(name, q, k, v) if name and mask is None else None
    return attention_with_lse(q, k, v, mask=mask) if found is None else found


def attend_heads(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None
) -> torch.Tensor | None:
    """Attention of q (B, H, S, D) over k (B, heads of keys, T, D) and v (B, heads of keys, T, Dv), as models attend.

    Returns (B, H, S, Dv); None where the kernel does not work here.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    width, values_width, times = max(q.shape[-1], v.shape[-1]), v.shape[-1], q.shape[1] // k.shape[1]
    k, v = (each if times == 1 else each.repeat_interleave(times, 1) for each in (k, v))
    by_token = (F.pad(each, (0, width - each.shape[-1])).transpose(1, 2) for each in (q, k, v))
    found = attention_by(name, *by_token, scale=scale)
    return None if found is None else found[0][..., :values_width].transpose(1, 2)
