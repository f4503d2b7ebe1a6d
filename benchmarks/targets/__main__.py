"""`python -m benchmarks.targets`: each figure as measured, beside its target.

Owns the measuring of what the pool costs beside computing. Does not own the comparison of what it computes
(`benchmarks/peers`). Runs on two CPU ranks of one thread.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles

import psutil
import torch
from safetensors.torch import save_file

from benchmarks.peers.shapes import SHAPES
from parallel_runtime.checkpoint import ModelSpec
from parallel_runtime.cli.verify import PlanRunner
from parallel_runtime.cli.workload import Workload
from parallel_runtime.devices import parse_devices
from parallel_runtime.models.flux.config import FluxConfig
from parallel_runtime.models.flux.sample import sample_config, write_sample
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.pool import Pool

from . import region_cost

ROOT = Path(__file__).resolve().parents[2]
PLAN = ParallelPlan(ulysses=2)
STEPS = 200
GIB = 2**30


def main() -> None:
    """Measures the figures asked for and prints a row each."""
    figures = {"hand_over": hand_over, "cold_start": cold_start, "memory": memory, "timing": timing, "stock": stock}
    parser = argparse.ArgumentParser(prog="benchmarks.targets", description=main.__doc__)
    parser.add_argument("figures", nargs="*", choices=[*figures, []], default=[*figures])
    show("| figure | target | measured |\n| --- | --- | --- |")
    for name in parser.parse_args().figures:
        figures[name]()
    show(f"\ntorch {torch.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")


@contextmanager
def model_of(config: FluxConfig) -> Iterator[str]:
    """A file of random weights."""
    with tempfile.TemporaryDirectory(prefix="targets-") as folder:
        path = str(Path(folder) / "model.safetensors")
        write_sample(path, config)
        yield path


def two_ranks() -> Pool:
    """A pool of two CPU ranks of one thread."""
    return Pool(parse_devices("cpu:2").devices, threads_per_rank=1)


def hand_over() -> None:
    """A step of a 1024 x 1024 latent less the time that the slowest rank was at it."""
    config = sample_config(heads=2, head_dim=32, depth=1, depth_single=1)
    tensors = Workload(width=1024, height=1024, text_tokens=512).tensors(config)
    with model_of(config) as path, two_ranks() as pool:
        runner = PlanRunner(pool, ModelSpec.of(path), PLAN, options={})
        lost = []
        for _ in range(STEPS + 5):
            began = time.perf_counter()
            runner(tensors)
            lost.append(1000 * (time.perf_counter() - began - max(rank.step_s for rank in runner.ranks)))
    lost = lost[5:]
    measured = f"median {median(lost):.2f} ms, p99 {quantiles(lost, n=100)[98]:.2f} ms, {STEPS} steps"
    show(f"| hand-over per step, host to pool and back, 1024 x 1024 | median 0.5 ms, p99 2 ms | {measured} |")


def cold_start() -> None:
    """From no process to the first result: a pool, and one process with as many threads; three of each, in turn."""
    shape = SHAPES["compute"]
    tensors = shape.workload.tensors(shape.config)
    pools, processes = [], []
    with model_of(shape.config) as path:
        inputs = str(Path(path).with_name("inputs.safetensors"))
        save_file(tensors, inputs)
        for _ in range(3):
            began = time.perf_counter()
            with two_ranks() as pool:
                PlanRunner(pool, ModelSpec.of(path), PLAN, options={})(tensors)
                pools.append(time.perf_counter() - began)
            began = time.perf_counter()
            command = [sys.executable, "-m", "benchmarks.targets.one_process", path, inputs, "2"]
            subprocess.run(command, cwd=ROOT, check=True, stderr=subprocess.DEVNULL)  # noqa: S603  our own module
            processes.append(time.perf_counter() - began)
    ratio = median(pool / process for pool, process in zip(pools, processes, strict=True))
    measured = f"{ratio:.2f}x ({median(pools):.2f} s against {median(processes):.2f} s, diffusers' import included)"
    show(f"| cold pool to first step, against one process | 1.15x | {measured} |")


def memory() -> None:
    """Private memory of both ranks since they were ready, for a file of 2 GiB with sharded weights.

    As many blocks as Flux.1 has: a rank also keeps two of them whole, so fewer and bigger ones would cost more.
    """
    config = sample_config(heads=12, head_dim=64, depth=19, depth_single=38)
    plan = ParallelPlan(ulysses=2, weights="sharded")
    tensors = Workload(width=128, height=128, text_tokens=16).tensors(config)
    with model_of(config) as path, two_ranks() as pool:
        size = Path(path).stat().st_size
        if size < 2 * GIB:
            raise ValueError(f"the file has {size} bytes, the target is for 2 GiB; use more blocks")
        pool.start()
        pids = pool.status()["pids"]
        before = private_bytes(pids)
        PlanRunner(pool, ModelSpec.of(path), plan, options={})(tensors)
        grown = private_bytes(pids) - before
    measured = f"{grown / size:.2f}x ({grown / GIB:.2f} GiB for {size / GIB:.2f} GiB)"
    show(f"| growth of private memory, summed over ranks, sharded weights | 1.15x the file | {measured} |")


def timing() -> None:
    """What it costs to time the regions of a step."""
    with model_of(region_cost.SHAPE.config) as path, two_ranks() as pool:
        for row in region_cost.rows(pool, path):
            show(f"| {' | '.join(row)} |")


def stock() -> None:
    """A step against stock ComfyUI's; needs the tests' environment, with PYTHONPATH=tests."""
    from .stock import rows  # here: the other figures need no ComfyUI

    for row in rows():
        show(f"| {' | '.join(row)} |")


def private_bytes(pids: list[int]) -> int:
    """What would be free if these processes ended."""
    return sum(psutil.Process(pid).memory_full_info().uss for pid in pids)


def show(text: str) -> None:
    """Prints a line at once."""
    print(text, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
