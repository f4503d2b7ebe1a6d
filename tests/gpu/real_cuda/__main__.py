"""`python -m gpu.real_cuda`: every kind of plan on this machine's GPUs against ranks on its CPU.

Each rank has a GPU of its own; `--ranks 4 --exchange nccl` are four ranks on one (sharing.py), as without a choice on a
machine with one GPU, after one rank alone.
The last line counts, and the exit status is 0, when all is well. Runs are those of the pretend devices, and held to
their tolerances; the control is a run without exchange, which must differ.
"""

import argparse
import os
import random
import sys
import tempfile
import time
from pathlib import Path

import torch

from gpu.cases import CHOICES, ROUNDS, Reference, drawn, write_model
from gpu.graph_chapters import CHAPTERS
from gpu.pretend_cuda.pool import Trial
from parallel_runtime.devices import Device, parse_devices
from parallel_runtime.errors import PoolError
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.pool import Pool

from .sharing import EXCHANGES, share

CONTROL = Trial(plan="ulysses=2")
SHARING = 4  # ranks on the one GPU of a machine
GRAPHS = [name for name in CHAPTERS if name not in ("one_cannot", "groups_end")]
VISIBLE = 1e-3  # what a run without exchange must differ by


def trials(ranks: int) -> list[Trial]:
    """Plans of at most so many ranks, with draws of weights, dtypes, runs and loops."""
    plans = tuple(plan for plan in CHOICES["plan"] if ParallelPlan.parse(plan).ranks <= ranks)
    choices = CHOICES | {"plan": plans} | ({} if ranks > 1 else {"weights": ("replicated",)})
    return [Trial(**row) for row in drawn(choices, rounds=ROUNDS, chance=random.Random(ranks))]  # noqa: S311


def wrong(pool: Pool, reference: Reference, trial: Trial, **options: object) -> tuple[float, str]:
    """The error of a trial, and what is wrong with it."""
    try:
        error = reference.error(pool, trial, options, dtype=trial.dtype)
    except PoolError as failure:
        return float("inf"), str(failure)[:3000]
    limit = reference.limit(trial.dtype)
    return error, "" if error <= limit else f"differs by {error:.1e}, more than {limit:.1e}"


def wrong_by_graphs(pool: Pool, chapter: str, plan: ParallelPlan) -> str:
    """What is wrong with CUDA graphs of blocks in a chapter of graph_chapters.py."""
    try:
        return CHAPTERS[chapter](pool, plan)
    except PoolError as failure:
        return str(failure)[:3000]


def run(ranks: int, exchange: str | None, match: str) -> tuple[int, list[str]]:
    """All trials of so many ranks: how many, and what is wrong. `exchange`: all of them on cuda:0, through this."""
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"  # convolutions in fp32 have 10 bits of mantissa else, as in stock
    if exchange:
        share(exchange)
    devices = tuple(Device("cuda", 0 if exchange else number) for number in range(ranks))
    found, count, worst = [], 0, dict.fromkeys(CHOICES["dtype"], 0.0)
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="real-cuda-") as folder,
        Pool(parse_devices("cpu:4").devices, threads_per_rank=1) as plain,
        Pool(devices, threads_per_rank=1) as pool,
    ):
        reference = Reference(plain, write_model(Path(folder)))
        for trial in trials(ranks):
            if match not in str(trial):
                continue
            count, start = count + 1, time.monotonic()
            error, said = wrong(pool, reference, trial)
            worst[trial.dtype] = max(worst[trial.dtype], error)
            say(f"{said or f'right, {error:.1e}'}, {time.monotonic() - start:.1f} s: {trial}")
            found += [f"{trial}: {said}"] if said else []
        for name in () if exchange == "gloo" else GRAPHS:  # which goes by the host, as no graph can
            count, said = count + 1, wrong_by_graphs(pool, name, ParallelPlan(ulysses=min(2, ranks)))
            say(f"{said or 'right'}: graphs of blocks, {name}")
            found += [f"graphs of blocks, {name}: {said}"] if said else []
        if ranks > 1:
            error, _ = wrong(pool, reference, CONTROL, local_attention=True)
            say(f"control, without exchange: {error:.1e}")
            found += [] if error > VISIBLE else ["the control does not differ"]
    for text in found:
        say(f"wrong: {text}")
    largest = ", ".join(f"{dtype} {error:.1e}" for dtype, error in worst.items())
    name = torch.cuda.get_device_name(0)
    where = f"{ranks} ranks on one {name} through {exchange}" if exchange else f"{ranks} of {name}"
    say(f"{where}: largest error {largest}; {time.monotonic() - began:.0f} s")
    return count, found


def main() -> int:
    """Run what the command line chooses; the exit status."""
    parser = argparse.ArgumentParser(prog="gpu.real_cuda", description=__doc__)
    parser.add_argument("--ranks", type=int, default=0, help="default: the number of GPUs; of a single one, 1 and 4")
    parser.add_argument("--exchange", choices=EXCHANGES, help="put all ranks on cuda:0, which exchange through this")
    parser.add_argument("--match", default="", metavar="TEXT", help="runs with this in their name")
    options = parser.parse_args()
    gpus = torch.cuda.device_count()
    if not gpus:
        say("no CUDA device found; make pretend-cuda runs the same plans without one")
        return 2
    chosen = [(options.ranks or gpus, options.exchange)]
    if not options.ranks and gpus == 1:
        chosen = [(1, None), *((SHARING, exchange) for exchange in EXCHANGES)]
    results = [run(ranks, exchange, options.match) for ranks, exchange in chosen]
    wrongs = sum(len(found) for _, found in results)
    say(f"{sum(count for count, _ in results)} cases, {wrongs} wrong")
    return 1 if wrongs else 0


def say(text: str) -> None:
    """One line, at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
