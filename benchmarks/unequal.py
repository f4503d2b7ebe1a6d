"""Shares of unequal devices, by the seconds for which each rank has a core; writes unequal.md.

    PYTHONPATH=tests python -m benchmarks.unequal [--turns 5]

Two CPU ranks of one thread compute the same step in equal shares and in shares of 2:1. Their own core seconds are
measured, and those of the second rank count twice, as if it were a device of half the speed: a step then takes as long
as the slower of the two. What ranks wait for each other, and what a link takes, is not in that.
"""

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from families.files import write_model_files
from families.variants import BY_NAME, write_families
from families.wan import wan_file
from host.fetch import comfyui_path
from parallel_runtime.devices import parse_devices
from parallel_runtime.model_call import ModelCall
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.planner.comfyui_process import find_comfyui
from parallel_runtime.pool.pool import Pool
from parallel_runtime.trials.trial import Trial
from parallel_runtime.trials.workload import Workload

from .before_after import core_s
from .planner_families import TEXT_TOKENS

PAGE = Path(__file__).with_suffix(".md")
SIX = wan_file("six_heads", "t2v", heads=6, seed=77)
FILES = {
    "flux.2 klein": BY_NAME["flux.2 klein"].file,
    "wan 2.1 t2v": BY_NAME["wan 2.1 t2v"].file,
    "wan, 6 heads": SIX.name,
}
MODELS = {
    "flux.2 klein": ((512, 512), (1024, 1024)),
    "wan 2.1 t2v": ((512, 384), (1024, 768)),
    "wan, 6 heads": ((1024, 768),),
}
PLANS = ("ulysses=2", "ring=2")
WAYS = ((), (2, 1))  # equal, and in proportion to the speeds


def core_seconds(
    pool: Pool, trial: Trial, plans: Sequence[ParallelPlan], calls: Sequence[ModelCall], turns: int
) -> list[list[float]]:
    """Of each plan, those of each rank: medians over turns, in each of which all plans compute a step."""
    pids, taken = pool.status()["pids"], [list[list[float]]() for _ in plans]
    for turn in range(turns + 1):
        for plan, steps in zip(plans, taken, strict=True):
            before = [core_s(pid) for pid in pids]
            pool.run(trial.spec, plan, calls)
            if turn:
                steps.append([core_s(pid) - was for pid, was in zip(pids, before, strict=True)])
    return [[statistics.median(each) for each in zip(*steps, strict=True)] for steps in taken]


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    turns = parser.parse_args().turns
    devices, comfyui, rows = parse_devices("cpu:2").devices, find_comfyui(str(comfyui_path())), list[str]()
    with tempfile.TemporaryDirectory(prefix="unequal-") as folder, Pool(devices, threads_per_rank=1) as pool:
        pool.start()
        models = write_families(Path(folder) / "models", only=list(MODELS)[:2]) / "diffusion_models"
        write_model_files(models, [SIX])
        for name, (width, height) in ((name, size) for name, sizes in MODELS.items() for size in sizes):
            workload = Workload(width=width, height=height, text_tokens=TEXT_TOKENS)
            path, given = str(models / FILES[name]), {"steps": 1, "comfyui": comfyui.path, "device": devices[0]}
            with closing(Trial(path, "float32", workload, [ParallelPlan()], **given)) as trial:
                calls = [replace(call, options={**call.options, "timed": False}) for call in trial.calls]
                plans = [
                    ParallelPlan(),
                    *(ParallelPlan.parse(text).with_shares(each) for text in PLANS for each in WAYS),
                ]
                (alone, _), *found = core_seconds(pool, trial, plans, calls, turns)
                for text, equal, shared in zip(PLANS, found[::2], found[1::2], strict=True):
                    (equal_s, shared_s), ideal = (
                        (max(quick, 2 * slow) for quick, slow in (equal, shared)),
                        2 * alone / 3,
                    )
                    told = [f"{quick:.3f} + {slow:.3f}" for quick, slow in (equal, shared)]
                    cells = [name, f"{width} x {height}", text, f"{alone:.3f}", *told, f"{equal_s / shared_s:.2f}x"]
                    cells += [f"{shared_s / ideal - 1:+.0%}", f"{alone / equal_s:.2f}x", f"{alone / shared_s:.2f}x"]
                    rows.append(f"| {' | '.join(cells)} |")
                    sys.stderr.write(rows[-1] + "\n")
                pool.unload(trial.spec)
    lines = [
        "# Shares of unequal devices",
        "",
        "`PYTHONPATH=tests python -m benchmarks.unequal` writes this page: two CPU ranks of one thread, small files",
        f"with random weights, fp32, one step, medians of {turns} turns. Core seconds of each rank are measured (load",
        f"{os.getloadavg()[0]:.0f} on {os.cpu_count()} cores, others used the machine); the second rank's count",
        "twice, as if it had half the speed. A step takes as long as the slower rank. Waiting and links are not in it.",
        "",
        "| model | pixels | plan | one rank, s | equal, s | 2:1, s | quicker by shares | above ideal | equal | 2:1 |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        *rows,
        "",
        "The last two columns are over one rank. The ideal is two thirds of what one rank takes alone, with nothing",
        "for the exchange. Targets: at least 1.25x quicker than equal shares, and within 8 % of the ideal.",
        "Ulysses shares out whole heads: flux.2 klein's 3 are 2 and 1 either way, wan's 5 are 3 and 2 either way.",
        "At the smaller sizes what a rank computes whatever its share is counts, and so do the copies of the exchange.",
    ]
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
