"""Experiment 6: a graph of each block over one rank's share: a step with and without, memory, and what recording takes.

The rank is experiment 3's, whose exchanges are local copies. "Queued" is a step by graphs of several that are awaited
together, as in the sampler's loop in ranks; else each step is. Both ways must compute the same, but where the rank has
no numbers: of a longer rank's tokens it has its own, and then none. In small form, on a CPU, the tape of
tests/gpu/tape.py stands for CUDA graphs: it shows that the path runs, and its time says nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.share.exchange import local_sequence
from benchmarks.share.rank import OneRank, timed_runs
from parallel_runtime.model_call import ModelCall
from parallel_runtime.models.hosted.block_graphs import BlockGraphs
from parallel_runtime.models.hosted.cuda_graphs import CudaRecorder, GraphRecorder
from parallel_runtime.planner.tries import GRAPHS_GAIN
from parallel_runtime.proof import relative_error

from .setting import GIB, Result, Setting

SAME = 1e-3  # a kernel may be chosen by how tensors lie
WRITTEN = 0.95  # of the output, at least: a rank lacks a token of a longer one's, or a few
MADE = 2  # calls before graphs replay


def run(setting: Setting) -> Result:
    """Every model, as one rank of 2, 4 and 8."""
    head = "| model | ranks | eager ms | graphs ms | gain | queued ms | recording s | GiB more | blocks | differs |"
    lines, gains, wrong = [head, "| --- " * 10 + "|"], list[tuple[float, str]](), dict[str, str]()
    recorder = recorder_for(setting.device)

    def measure(name: str, rank: OneRank) -> None:
        call = rank.call(setting.size(name))
        for ranks in (2,) if setting.small else (2, 4, 8):
            found, case = compared(rank, call, ranks, setting.steps, recorder), f"{name} as one of {ranks}"
            lines.append(f"| {name} | {ranks} | {found.row} |")
            gains.append((found.gain, case))
            if found.wrong:
                wrong[case] = found.wrong

    failed = setting.each_model(measure) | wrong
    if wrong and setting.small:
        raise ValueError(f"{wrong}")
    best, where = max(gains)
    stays = "graphs stay" if best >= GRAPHS_GAIN else "graphs go: none gains enough"
    decided = f"at best {best:.2f}x, {where}: {stays}" if setting.capability else "tapes compute the same"
    return Result(table=lines, decided=decided, failed=failed)


def recorder_for(device: torch.device) -> Callable[[], GraphRecorder]:
    """What makes graphs on a device."""
    if device.type == "cuda":
        return partial(CudaRecorder, device)
    from gpu import tape

    tape.install()
    return tape.Tape


@dataclass(frozen=True)
class Found:
    """Of one comparison: how many times as fast a step is, what is wrong with its result, and the row."""

    gain: float
    wrong: str
    row: str


def compared(rank: OneRank, call: ModelCall, ranks: int, steps: int, recorder: Callable[[], GraphRecorder]) -> Found:
    """A step with and without graphs."""
    sequence = local_sequence(ulysses=ranks, device=rank.device)
    eager = rank.step(call, sequence)
    eager_s, _ = timed_runs(eager, steps)
    out = eager()[0].clone()
    written = ~poisoned(eager).isnan()
    before, recorded_s = _reserved(rank.device), rank.recorded_s
    graphs = BlockGraphs(rank.model.blocks, recorder)
    by_graphs = rank.step(call, sequence, graphs=graphs)
    for _ in range(MADE):
        by_graphs()
    recorded_s = rank.recorded_s - recorded_s
    graphs_s, _ = timed_runs(by_graphs, steps)
    queued_s = rank.step_of_several_s(call, sequence, steps=2 * steps, graphs=graphs)
    error = relative_error(by_graphs()[0][written], out[written])
    more = (_reserved(rank.device) - before) / GIB
    made = f"{graphs.count} of {rank.blocks}"
    graphs.drop()
    gain = eager_s / graphs_s
    cells = [f"{1e3 * eager_s:.2f}", f"{1e3 * graphs_s:.2f}", f"{gain:.2f}x", f"{1e3 * queued_s:.2f}"]
    cells += [f"{recorded_s:.2f}", f"{more:.2f}", made, f"{error:.1e}"]
    return Found(gain, what_is_wrong(error, float(written.float().mean())), " | ".join(cells))


def what_is_wrong(error: float, written: float) -> str:
    """Of a step by graphs that differs so much from an eager one in the part of the output that was written."""
    if written < WRITTEN:
        return f"{written:.1%} of the output was written, at least {WRITTEN:.0%} must be, or nothing is compared"
    return "" if error <= SAME else f"graphs differ by {error:.1e}, at most {SAME:g} is rounding"


def poisoned(step: Callable[[], tuple[torch.Tensor, object]]) -> torch.Tensor:
    """What a step computes where memory that nobody wrote to is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # which fills such memory
    try:
        return step()[0].clone()
    finally:
        torch.use_deterministic_algorithms(False)


def _reserved(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
