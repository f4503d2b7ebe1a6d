"""`python -m benchmarks.targets`: each figure as measured, beside its target. Needs PYTHONPATH=tests.

Owns the measuring of what the pool costs beside computing, on two CPU ranks of one thread. Does not own what a change
does to a step (`benchmarks/before_after.py`).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import median, quantiles

import psutil
import torch

from benchmarks.before_after import TEXT, told_comfyui, write_model
from parallel_runtime.devices import parse_devices
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.pool import Pool
from parallel_runtime.trials.plan_runner import PlanRunner
from parallel_runtime.trials.trial import Trial
from parallel_runtime.trials.workload import Workload

from . import region_cost

PLAN = ParallelPlan(ulysses=2)
MODEL = "Flux.1"
STEPS = 200
GIB = 2**30


def main() -> None:
    """Measures the figures asked for and prints a row each."""
    figures = {"hand_over": hand_over, "memory": memory, "timing": timing, "stock": stock}
    parser = argparse.ArgumentParser(prog="benchmarks.targets", description=main.__doc__)
    parser.add_argument("figures", nargs="*", choices=[*figures, []], default=[*figures])
    show("| figure | target | measured |\n| --- | --- | --- |")
    for name in parser.parse_args().figures:
        figures[name]()
    show(f"\ntorch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")


@contextmanager
def two_ranks_with(blocks: int, heads: int, *, side: int) -> Iterator[tuple[Pool, Trial]]:
    """A pool of two CPU ranks of one thread, which has no model yet; and one's file and call, by pixels a side."""
    devices = parse_devices("cpu:2").devices
    with tempfile.TemporaryDirectory(prefix="targets-") as folder, Pool(devices, threads_per_rank=1) as pool:
        path = str(write_model(Path(folder), MODEL, blocks, heads))
        work = Workload(width=side, height=side, text_tokens=TEXT)
        comfyui = str(told_comfyui(Path(folder)))
        given = {"steps": 1, "comfyui": comfyui, "device": devices[0]}
        with closing(Trial(path, "float32", work, [PLAN], **given)) as trial:
            yield pool, trial


def hand_over() -> None:
    """A step of a 1024 x 1024 latent less the time that the slowest rank was at it."""
    with two_ranks_with(blocks=3, heads=2, side=1024) as (pool, trial):
        runner = PlanRunner(pool, trial.spec, PLAN, options={})
        lost = []
        for _ in range(STEPS + 5):
            began = time.perf_counter()
            runner.run(trial.calls)
            lost.append(1000 * (time.perf_counter() - began - max(rank.step_s for rank in runner.ranks)))
    lost = lost[5:]
    measured = f"median {median(lost):.2f} ms, p99 {quantiles(lost, n=100)[98]:.2f} ms, {STEPS} steps"
    show(f"| hand-over per step, host to pool and back, 1024 x 1024 | median 0.5 ms, p99 2 ms | {measured} |")


def memory() -> None:
    """Private memory of both ranks since the model's first step with whole weights, for sharded ones.

    As many blocks as Flux.1 has: a rank also keeps two of them whole, so fewer and bigger ones would cost more.
    """
    plan = ParallelPlan(ulysses=2, weights="sharded")
    with two_ranks_with(blocks=57, heads=5, side=128) as (pool, trial):
        size = Path(trial.spec.path).stat().st_size
        pool.start()
        pids = pool.status()["pids"]
        before = private_bytes(pids)
        PlanRunner(pool, trial.spec, plan, options={}).run(trial.calls)
        grown = private_bytes(pids) - before
    measured = f"{grown / size:.2f}x ({grown / GIB:.2f} GiB for {size / GIB:.2f} GiB, ComfyUI's import among it)"
    show(f"| growth of private memory, summed over ranks, sharded weights | 1.15x the file | {measured} |")


def timing() -> None:
    """What it costs to time the regions of a step."""
    with two_ranks_with(blocks=24, heads=2, side=128) as (pool, trial):
        for row in region_cost.rows(pool, trial):
            show(f"| {' | '.join(row)} |")


def stock() -> None:
    """A step against stock ComfyUI's."""
    from .stock import rows  # here: it starts a server's modules

    for row in rows():
        show(f"| {' | '.join(row)} |")


def private_bytes(pids: list[int]) -> int:
    """What would be free if these processes ended."""
    return sum(psutil.Process(pid).memory_full_info().uss for pid in pids)


def show(text: str) -> None:
    """Prints a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
