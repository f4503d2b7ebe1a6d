"""torch's own switches that change what an operation computes, from ComfyUI's process to the ranks.

ComfyUI sets some by its options, some in its main program alone, and packs set others. Owns which there are, and how
each is read and set. A switch that this torch lacks, or refuses to tell, is left out.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, reduce

import torch

ATTRIBUTES = (
    *(f"cuda.matmul.{name}" for name in ("allow_tf32", "allow_fp16_accumulation")),
    *(f"cuda.matmul.allow_{name}_reduced_precision_reduction" for name in ("fp16", "bf16")),
    *(f"cudnn.{name}" for name in ("enabled", "allow_tf32", "benchmark", "deterministic")),
    "mkldnn.enabled",
)
PRECISIONS = ("cuda.matmul.fp32_precision", "cudnn.conv.fp32_precision")
SDP_KERNELS = ("flash", "mem_efficient", "math", "cudnn")
EXACT_FP32: Mapping[str, bool | str] = {
    "torch.float32_matmul_precision": "highest",
    **{f"torch.backends.{name}.allow_tf32": False for name in ("cuda.matmul", "cudnn")},
    **{f"torch.backends.{name}.fp32_precision": "ieee" for name in ("cuda.matmul", "cudnn.conv")},
}


@dataclass(frozen=True)
class Switch:
    """How one is read, and set to what was read elsewhere."""

    read: Callable[[], bool | str]
    set: Callable[[bool | str], object]


def read_flags() -> dict[str, bool | str]:
    """All switches of this process, by name."""
    found = {name: _value(switch) for name, switch in _switches().items()}
    return {name: value for name, value in found.items() if value is not None}


def set_flags(wanted: Mapping[str, bool | str]) -> None:
    """Give this process what another one has. What is so already is not touched."""
    for name, switch in _switches().items():
        if name not in wanted:
            continue
        try:
            here = switch.read()
        except AttributeError:  # this torch has none
            continue
        except RuntimeError:  # torch refuses to tell: it was set by its other name
            here = None
        if here != wanted[name]:
            switch.set(wanted[name])


@contextmanager
def exact_fp32() -> Iterator[None]:
    """Inside, products of fp32 tensors are of all their digits.

    Outside, cuDNN's convolutions have 11 of 24 bits wherever torch's default stands (TF32), and how they round changes
    with their shapes: in two steps of a model that was enough for a relative error of 2e-5.
    """
    switches = _switches()
    before = {name: value for name, value in read_flags().items() if name in EXACT_FP32}
    changed = [name for name, value in before.items() if value != EXACT_FP32[name]]
    for name in changed:
        switches[name].set(EXACT_FP32[name])
    try:
        yield
    finally:
        for name in changed:
            switches[name].set(before[name])
        set_flags(before)  # one that was exact before is changed by the others' older names


def _value(switch: Switch) -> bool | str | None:
    """None where this torch has no such switch, or refuses to tell."""
    try:
        found = switch.read()
    except (AttributeError, RuntimeError):  # torch refuses to read by one name what was set by its other one
        return None
    return found if type(found) in (bool, str) else None


def _switches() -> Mapping[str, Switch]:
    """In the order to set them: `allow_tf32` sets the matmul precision, and both of these set `fp32_precision`."""
    found = {f"torch.backends.{name}": _attribute(name) for name in ATTRIBUTES}
    for kernel in SDP_KERNELS:
        name = f"{kernel}_sdp"
        found[f"torch.backends.cuda.{name}"] = _pair(torch.backends.cuda, f"{name}_enabled", f"enable_{name}")
    name = "fp16_bf16_reduction_math_sdp"
    found[f"torch.backends.cuda.{name}"] = _pair(torch.backends.cuda, f"{name}_allowed", f"allow_{name}")
    precision = "float32_matmul_precision"
    found[f"torch.{precision}"] = _pair(torch, f"get_{precision}", f"set_{precision}")
    found |= {f"torch.backends.{name}": _attribute(name) for name in PRECISIONS}
    found["torch.deterministic_algorithms"] = Switch(_deterministic, _set_deterministic)
    return found


def _attribute(path: str) -> Switch:
    owner_path, _, name = path.rpartition(".")
    owner = partial(reduce, getattr, owner_path.split("."), torch.backends)
    return Switch(lambda: getattr(owner(), name), lambda value: setattr(owner(), name, value))


def _pair(owner: object, read: str, write: str) -> Switch:
    return Switch(lambda: getattr(owner, read)(), lambda value: getattr(owner, write)(value))


def _deterministic() -> str:
    if not torch.are_deterministic_algorithms_enabled():
        return "off"
    return "warn" if torch.is_deterministic_algorithms_warn_only_enabled() else "on"


def _set_deterministic(value: bool | str) -> None:
    torch.use_deterministic_algorithms(value != "off", warn_only=value == "warn")
