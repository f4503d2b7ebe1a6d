"""What a rank's device and its links do in a second: matrices, attention, memory, and exchanges over one axis.

Owns the measurements, each at two sizes, so that what a call costs is told from what its size costs. All ranks of the
axis must probe at once. What follows from the numbers is the planner's.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..parallel.collectives import Axis
from ..parallel.kernels import attention
from ..planner.hardware import NARROW
from ..wire.replies import ProbeReply
from .measure import operand

RUNS = 9
SMALL = 64  # a side of a matrix that takes a device no time
OPERATIONS = 8  # of the chain of small ones
CHAINED = 25


@dataclass(frozen=True)
class _Sizes:
    """Small and large, for a kind of device: long enough to time, short enough not to be noticed."""

    width: int
    heads: int
    rows: tuple[int, int]
    tokens: tuple[int, int]
    sent_bytes: tuple[int, int]
    copied_bytes: int


SIZES = {
    "cpu": _Sizes(512, 8, (128, 1024), (256, 1024), (1 << 14, 1 << 21), 1 << 24),
    "cuda": _Sizes(3072, 24, (1024, 4608), (1152, 4608), (1 << 18, 1 << 25), 1 << 30),
}


def probe(axis: Axis, device: torch.device) -> ProbeReply:
    """Measure the device, and the axis where it has several ranks."""
    sizes = SIZES[device.type]
    sent_bytes = sizes.sent_bytes if axis.size > 1 else ()
    return ProbeReply(
        matmul=tuple(_matmul(sizes, rows, device) for rows in sizes.rows),
        attention=tuple(_attention(sizes, tokens, device) for tokens in sizes.tokens),
        memory=(_memory(sizes, device),),
        all_to_all=tuple(_all_to_all(axis, num_bytes, device) for num_bytes in sent_bytes),
        narrow_attention=tuple(_narrow_attention(sizes, tokens, device) for tokens in sizes.tokens),
        elementwise=(_elementwise(sizes, device),),
        operations=(_operations(device),),
    )


def _matmul(sizes: _Sizes, rows: int, device: torch.device) -> tuple[float, float]:
    left, right = operand(rows, sizes.width, device=device), operand(sizes.width, 4 * sizes.width, device=device)
    return 2.0 * rows * 4 * sizes.width**2, _seconds(lambda: left @ right, device)


def _attention(sizes: _Sizes, tokens: int, device: torch.device) -> tuple[float, float]:
    q = operand(1, tokens, sizes.heads, sizes.width // sizes.heads, device=device)
    return 4.0 * tokens**2 * sizes.width, _seconds(lambda: attention(q, q, q), device)


def _narrow_attention(sizes: _Sizes, tokens: int, device: torch.device) -> tuple[float, float]:
    q = operand(1, tokens, sizes.heads, NARROW, device=device)
    return 4.0 * tokens**2 * sizes.heads * NARROW, _seconds(lambda: attention(q, q, q), device)


def _elementwise(sizes: _Sizes, device: torch.device) -> tuple[float, float]:
    """What a block has between its matrices: a norm, an activation, a modulation, a residual."""
    x, row = operand(sizes.rows[1], sizes.width, device=device), operand(sizes.width, device=device)

    def chain() -> torch.Tensor:
        return x + F.silu(F.layer_norm(x, (sizes.width,)) * row + row) * row

    return 13.0 * x.nbytes, _seconds(chain, device)  # six operations that read one and write one, and a second one read


def _operations(device: torch.device) -> tuple[float, float]:
    """Small operations as a module calls them: what the host takes to start one."""
    layer, norm = torch.nn.Linear(SMALL, SMALL, device=device), torch.nn.LayerNorm(SMALL, device=device)
    x = torch.zeros(SMALL, SMALL, device=device)

    def chain() -> torch.Tensor:
        out = x
        for _ in range(CHAINED):
            out = (layer(norm(out)) * out + out).view(SMALL, SMALL).transpose(0, 1)
        return out

    with torch.no_grad():
        return float(CHAINED * OPERATIONS), _seconds(chain, device)


def _memory(sizes: _Sizes, device: torch.device) -> tuple[float, float]:
    source = torch.zeros(sizes.copied_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2.0 * sizes.copied_bytes, _seconds(lambda: target.copy_(source), device)


def _all_to_all(axis: Axis, num_bytes: int, device: torch.device) -> tuple[float, float]:
    """Every rank sends `num_bytes` to others, in equal parts."""
    part = num_bytes // (axis.size - 1)
    lengths = (part,) * axis.size
    send = torch.zeros(part * axis.size, dtype=torch.uint8, device=device)

    def exchange() -> torch.Tensor:
        return axis.all_to_all(send, send_lengths=lengths, receive_lengths=lengths)

    return float(part * (axis.size - 1)), _seconds(exchange, device, alone=False)


def _seconds(run: Callable[[], object], device: torch.device, *, alone: bool = True) -> float:
    """The median of a few runs after one that warms up, each waited for.

    `alone`: it waits for no other rank. Then, of a CPU rank of one thread, the time counts for which that has a core,
    as what others do there says nothing of it. Of a CPU's exchanges the quickest counts, for the same reason.
    """
    on_cpu = device.type == "cpu"
    clock = time.thread_time if on_cpu and alone and torch.get_num_threads() == 1 else time.perf_counter
    taken = []
    for _ in range(RUNS + 1):
        began = clock()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(clock() - began)
    return min(taken[1:]) if on_cpu and not alone else statistics.median(taken[1:])
