"""Heads in chunks over a real slow link: a step of Wan by two ranks, in one chunk and in as many as ranks choose.

    unshare -n sh -c 'ip link set lo up && tc qdisc add dev lo root tbf rate 1gbit burst 256kb latency 400ms && \\
        PYTHONPATH=tests python -m benchmarks.slow_link --gbit 1 [--pairs 11]'

Prints the figures of benchmarks/head_chunks.md, "Over a real slow link"; writes no page.

Two pools of two CPU ranks of one thread, both alive all the time, take turns at the same call; messages of each go over
the loopback of a network namespace, whose rate tc bounds. On CPUs ranks take one chunk by themselves, since their cores
carry the bytes; here one pool is told the link's rate. Outputs of both must have the same bits, and the second must
send more messages.
"""

import argparse
import os
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import median, quantiles

import torch

from benchmarks.before_after import TEXT, told_comfyui, write_model
from parallel_runtime.devices import parse_devices
from parallel_runtime.parallel.overlap import OverlapRates
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.pool import Pool
from parallel_runtime.trials.plan_runner import PlanRunner
from parallel_runtime.trials.trial import Trial
from parallel_runtime.trials.workload import Workload

PLAN, WARMUP = ParallelPlan(ulysses=2), 2
BLOCKS, HEADS = 1, 8


def main() -> None:
    """Measure and print a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gbit", type=float, required=True, help="the rate that tc was given")
    parser.add_argument("--pairs", type=int, default=11)
    parser.add_argument("--side", type=int, default=640, help="pixels")
    parser.add_argument(
        "--gflops", type=float, default=80, help="of attention, by which the number of chunks is chosen"
    )
    arguments = parser.parse_args()
    bandwidth = arguments.gbit * 1e9 / 8
    rates = OverlapRates(attention_flops=arguments.gflops * 1e9, bandwidth=bandwidth, latency_s=2e-4, most_chunks=HEADS)
    devices = parse_devices("cpu:2").devices
    with ExitStack() as until:
        folder = Path(until.enter_context(tempfile.TemporaryDirectory(prefix="slow-link-")))
        path = str(write_model(folder, "Wan 2.1", BLOCKS, HEADS))
        work = Workload(width=arguments.side, height=arguments.side, text_tokens=TEXT, frames=9)
        given = {"steps": 1, "comfyui": str(told_comfyui(folder)), "device": devices[0]}
        trial = until.enter_context(closing(Trial(path, "float32", work, [PLAN], **given)))
        runners = []
        for told in (None, rates):
            pool = until.enter_context(Pool(devices, threads_per_rank=1, overlap=lambda _, told=told: told))
            runners.append(PlanRunner(pool, trial.spec, PLAN, options={}))
        whole, chunked = (runner.run(trial.calls)[0] for runner in runners)
        if not torch.equal(whole, chunked):
            raise ValueError("chunks changed bits of the output")
        taken = []
        for number in range(arguments.pairs + WARMUP):
            took = {}
            for runner in runners if number % 2 else runners[::-1]:
                began = time.perf_counter()
                runner.run(trial.calls)
                took[runner] = 1000 * (time.perf_counter() - began)
            taken.append([took[runner] for runner in runners])
        one, more = zip(*taken[WARMUP:], strict=True)
        sent = [runner.ranks[0].collectives for runner in runners]
        if sent[1] <= sent[0]:
            raise ValueError(f"ranks chose one chunk at {arguments.gbit:g} Gbit/s; use a slower link or more pixels")
        low, middle, high = quantiles((after / before for before, after in zip(one, more, strict=True)), n=4)
    sys.stdout.write(
        f"{arguments.gbit:g} Gbit/s: one chunk {median(one):.0f} ms ({sent[0]} messages a rank), chunks "
        f"{median(more):.0f} ms ({sent[1]}); {middle:.3f}x of each pair, quartiles {low:.3f} to {high:.3f}, "
        f"{arguments.pairs} pairs, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, same bits\n"
    )


if __name__ == "__main__":
    main()
