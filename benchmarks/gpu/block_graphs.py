"""Experiment 6: a graph of each block over one rank's share: a step with and without, memory, and what recording takes.

The rank is experiment 3's, whose exchanges are local copies. Both ways must compute the same. In small form, on a CPU,
the tape of tests/gpu/tape.py stands for CUDA graphs: it shows that the path runs, and its time says nothing.
"""

from collections.abc import Callable
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
MADE = 2  # calls before graphs replay


def run(setting: Setting) -> Result:
    """Every model, as one rank of 2, 4 and 8."""
    lines = ["| model | ranks | eager ms | graphs ms | gain | recording s | GiB more | blocks |", "| --- " * 8 + "|"]
    gains, recorder = [], recorder_for(setting.device)
    for name in setting.model_names():
        rank = setting.rank(name)
        call = rank.call(setting.size(name))
        for ranks in (2,) if setting.small else (2, 4, 8):
            gain, line = compared(rank, call, ranks, setting.steps, recorder)
            gains.append((gain, f"{name} as one of {ranks}"))
            lines.append(f"| {name} | {ranks} | {line} |")
        del rank
        if setting.device.type == "cuda":
            torch.cuda.empty_cache()
    best, where = max(gains)
    stays = "graphs stay" if best >= GRAPHS_GAIN else "graphs go: none gains enough"
    decided = f"at best {best:.2f}x, {where}: {stays}" if setting.capability else "tapes compute the same"
    return Result(table=lines, decided=decided)


def recorder_for(device: torch.device) -> Callable[[], GraphRecorder]:
    """What makes graphs on a device."""
    if device.type == "cuda":
        return partial(CudaRecorder, device)
    from gpu import tape

    tape.install()
    return tape.Tape


def compared(
    rank: OneRank, call: ModelCall, ranks: int, steps: int, recorder: Callable[[], GraphRecorder]
) -> tuple[float, str]:
    """How many times as fast a step is, and its row. Raises `ValueError` where graphs compute something else."""
    sequence = local_sequence(ulysses=ranks, device=rank.device)
    eager = rank.step(call, sequence)
    eager_s, _ = timed_runs(eager, steps)
    out = eager()[0].clone()
    before = _reserved(rank.device)
    graphs = BlockGraphs(rank.model.blocks, recorder)
    by_graphs = rank.step(call, sequence, graphs=graphs)
    for _ in range(MADE):
        by_graphs()
    recorded_s = graphs.recorded_s
    graphs_s, _ = timed_runs(by_graphs, steps)
    if not (error := relative_error(by_graphs()[0], out)) <= SAME:
        raise ValueError(f"{rank.name}, {ranks} ranks: graphs differ by {error:.1e}, at most {SAME:g} is rounding")
    more = (_reserved(rank.device) - before) / GIB
    made = f"{graphs.count} of {rank.blocks}"
    graphs.drop()
    gain = eager_s / graphs_s
    return gain, f"{1e3 * eager_s:.2f} | {1e3 * graphs_s:.2f} | {gain:.2f}x | {recorded_s:.2f} | {more:.2f} | {made}"


def _reserved(device: torch.device) -> int:
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0
