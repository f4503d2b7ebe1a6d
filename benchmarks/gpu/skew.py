"""Experiment 8: how much the host's time for a block varies, and what that costs where ranks wait for the slowest.

The host's times between blocks of a call in which the device has next to nothing to do: on one core alone, free, and
beside busy neighbours; with what lives long frozen for the garbage collector, and without. Of N ranks that draw from
these times at random, each block takes the longest of N.
"""

import gc
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from statistics import mean, median, quantiles

from benchmarks.share.exchange import local_sequence
from benchmarks.share.rank import OneRank
from parallel_runtime.model_call import ModelCall

from .setting import Result, Setting

NEIGHBOURS = 8
STEPS = 200
DRAWS = 4000
RANKS = (2, 4, 8)
WORTHWHILE = 1.02  # of the mean, above which freezing pays


def run(setting: Setting) -> Result:
    """Each condition."""
    rank = setting.rank(setting.model_names()[0])
    call = rank.small_call(setting.size(setting.model_names()[0]))
    steps = 4 if setting.small else STEPS
    neighbours = 1 if setting.small else NEIGHBOURS
    head = "| condition | frozen | p50 us | p99 us | most us | " + " | ".join(f"{n} ranks, mean us" for n in RANKS)
    lines = [f"{head} |", "| --- " * (5 + len(RANKS)) + "|"]
    means: dict[bool, list[float]] = {False: [], True: []}
    for condition in ("one core", "free", f"{neighbours} busy neighbours"):
        with on_one_core(condition == "one core"), busy(neighbours if "busy" in condition else 0):
            for frozen in (False, True):
                times = block_times(rank, call, steps, frozen=frozen)
                means[frozen].append(mean(times))
                cells = [
                    median(times),
                    quantiles(times, n=100, method="inclusive")[98],
                    max(times),
                    *(longest(times, n) for n in RANKS),
                ]
                said = " | ".join(f"{1e6 * each:.0f}" for each in cells)
                lines.append(f"| {condition} | {'yes' if frozen else 'no'} | {said} |")
    ratio = mean(before / after for before, after in zip(means[False], means[True], strict=True))
    what = "pays" if ratio >= WORTHWHILE else "gives little"
    decided = f"without gc.freeze a block's host time is {ratio:.3f}x: freezing {what}"
    return Result(table=lines, decided=decided)


def block_times(rank: OneRank, call: ModelCall, steps: int, *, frozen: bool) -> list[float]:
    """Seconds of host between two blocks, of all steps."""
    step = rank.step(call, local_sequence(ulysses=2, device=rank.device))
    step()
    gc.collect()
    if frozen:
        gc.freeze()
    try:
        found: list[float] = []
        for _ in range(steps):
            _, beats = step()
            found += [after - before for before, after in pairwise(beats.host_s[:-1])]
        return found
    finally:
        gc.unfreeze()


def longest(times: Sequence[float], ranks: int) -> float:
    """The mean of the longest of so many draws."""
    draw = random.Random(7)  # noqa: S311  a sample
    return mean(max(draw.choices(times, k=ranks)) for _ in range(DRAWS))


@contextmanager
def on_one_core(wanted: bool) -> Iterator[None]:
    """Inside, this process has one core."""
    before = os.sched_getaffinity(0)
    if wanted:
        os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Inside, so many processes compute without pause."""
    command = [sys.executable, "-c", "while True: sum(range(10000))"]
    others = [subprocess.Popen(command) for _ in range(count)]  # noqa: S603  our own interpreter
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()
