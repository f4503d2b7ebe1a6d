"""Experiment 2: which kernel of torch attends fastest, with and without log-sum-exp, at the shapes that ranks have.

q, k and v lie as they leave an exchange: views of one buffer with tokens outermost. Each kernel is timed with them so,
and made contiguous before.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import torch
import torch.nn.functional as F

from parallel_runtime.parallel.shard import split_lengths

from .setting import Result, Setting

aten = torch.ops.aten
RUNS = 5
ENOUGH_S = 0.5  # of runs of one kernel, where there are three
AT_LEAST_S, USUAL_FLOPS, MOST_LAUNCHES = 4e-3, 300e12, 50  # what is timed at once, so that launches do not count
AHEAD_CYCLES = 5_000_000  # some milliseconds
BETTER = 1.05  # what a kernel must reach of the present one before it takes its place
PRESENT = "flash"  # the kernel that ComfyUI asks first


@dataclass(frozen=True)
class Shape:
    """Attention of one published model at its usual size: all heads, their size, all tokens."""

    name: str
    heads: int
    width: int
    tokens: int


SHAPES = (
    Shape("flux.1", 24, 128, 4608),
    Shape("qwen-image", 24, 128, 7401),
    Shape("wan 14b", 40, 128, 32760),
    Shape("ltx-2", 32, 128, 14000),
    Shape("minimax h3", 56, 128, 60000),
)
SMALL = (Shape("tiny", 4, 16, 65),)
Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]


def kernels(device: torch.device, *, with_lse: bool) -> dict[str, Kernel]:
    """Those of this torch for a kind of device, by name; q, k, v are (B, H, S, D)."""
    if device.type == "cpu":
        if with_lse:
            return {"cpu": lambda q, k, v: aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)}
        return {"dispatched": F.scaled_dot_product_attention}
    if with_lse:
        found: dict[str, Kernel] = {
            "flash": lambda q, k, v: aten._scaled_dot_product_flash_attention(q, k, v),
            "efficient": lambda q, k, v: aten._scaled_dot_product_efficient_attention(q, k, v, None, True),
        }
        if hasattr(aten, "_scaled_dot_product_cudnn_attention"):
            found["cudnn"] = lambda q, k, v: aten._scaled_dot_product_cudnn_attention(q, k, v, None, True)
        return found
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def through(backend: SDPBackend) -> Kernel:
        def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> object:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v)

        return kernel

    named = {"flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION", "efficient": "EFFICIENT_ATTENTION"}
    return {name: through(getattr(SDPBackend, each)) for name, each in named.items() if hasattr(SDPBackend, each)}


def as_exchanged(heads: int, shape: Shape, device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k and v (1, heads, tokens, width), views of one buffer with tokens outermost."""
    buffer = torch.randn(shape.tokens, 3 * heads * shape.width, device=device, dtype=dtype)
    return [
        part.unflatten(1, (1, heads, shape.width)).permute(1, 2, 0, 3) for part in buffer.split(heads * shape.width, 1)
    ]


def run(setting: Setting) -> Result:
    """TFLOP/s of each kernel."""
    dtype = getattr(torch, setting.dtype)
    lines = ["| shape | ranks | heads | log-sum-exp | kernel | TFLOP/s | contiguous |", "| --- " * 7 + "|"]
    reached: dict[tuple[bool, str], list[float]] = {}
    for shape, ranks in _cases(small=setting.small):
        heads = split_lengths(shape.heads, ranks)[0]
        qkv = as_exchanged(heads, shape, setting.device, dtype)
        whole = [each.contiguous() for each in qkv]
        for with_lse in (False, True):
            for name, kernel in kernels(setting.device, with_lse=with_lse).items():
                flops = 4.0 * heads * shape.tokens**2 * shape.width
                rates = [_rate(kernel, each, flops, setting.device) for each in (qkv, whole)]
                reached.setdefault((with_lse, name), []).append(rates[0])
                cells = (f"{rate / 1e12:.3g}" if rate else "refuses" for rate in rates)
                lse = "with" if with_lse else "without"
                lines.append(f"| {shape.name} | {ranks} | {heads} | {lse} | {name} | " + " | ".join(cells) + " |")
    first, ring = (
        best({name: rates for (lse, name), rates in reached.items() if lse == each}) for each in (False, True)
    )
    choices = {"sdpa_first": "" if first == PRESENT else first, "ring_kernel": ring} if setting.capability else {}
    usual, most = (of(reached[False, first]) for of in (median, max))
    decided = (
        f"asked first: {first}, {usual / 1e12:.3g} TFLOP/s in the median, at most {most / 1e12:.3g}; of a ring: {ring}"
    )
    return Result(table=lines, decided=decided, choices=choices, constants={"attention_flops": usual})


def best(reached: dict[str, list[float]]) -> str:
    """The kernel with the largest median ratio to the present one, which stays unless another is clearly better.

    One that refuses a shape is not taken.
    """
    taking = {name: rates for name, rates in reached.items() if all(rates)}
    if not taking:
        return PRESENT
    if PRESENT not in taking:
        return max(taking, key=lambda name: median(taking[name]))
    ratios = {
        name: median(mine / present for mine, present in zip(rates, taking[PRESENT], strict=True))
        for name, rates in taking.items()
    }
    found = max(ratios, key=lambda name: ratios[name])
    return found if ratios[found] >= BETTER else PRESENT


def _cases(*, small: bool) -> Iterator[tuple[Shape, int]]:
    for shape in SMALL if small else SHAPES:
        for ranks in (1, 2) if small else (1, 2, 4, 8):
            yield shape, ranks


def _rate(kernel: Kernel, qkv: list[torch.Tensor], flops: float, device: torch.device) -> float:
    """FLOP/s, median of a few; 0 where the kernel refuses."""
    began, seconds = time.monotonic(), list[float]()
    try:
        while len(seconds) < 1 + RUNS and (len(seconds) < 4 or time.monotonic() - began < ENOUGH_S):
            seconds.append(_seconds(kernel, qkv, device, flops))
    except RuntimeError:
        return 0.0
    return flops / median(seconds[1:])


def _seconds(kernel: Kernel, qkv: list[torch.Tensor], device: torch.device, flops: float) -> float:
    if device.type != "cuda":
        began = time.perf_counter()
        kernel(*qkv)
        return time.perf_counter() - began
    launches = min(MOST_LAUNCHES, max(1, round(AT_LEAST_S * USUAL_FLOPS / flops)))
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(AHEAD_CYCLES)  # the host is ahead of the device then
    start.record()
    for _ in range(launches):
        kernel(*qkv)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000 / launches
