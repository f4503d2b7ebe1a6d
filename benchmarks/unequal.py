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

from families.variants import BY_NAME, write_families
from host.fetch import comfyui_path
from parallel_runtime.cli.trial import Trial
from parallel_runtime.cli.workload import Workload
from parallel_runtime.devices import parse_devices
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.planner.comfyui_process import find_comfyui
from parallel_runtime.pool.calls import ModelCall
from parallel_runtime.pool.pool import Pool

from .before_after import core_s
from .planner_families import TEXT_TOKENS

PAGE = Path(__file__).with_suffix(".md")
MODELS = (("flux.2 klein", 512, 512), ("wan 2.1 t2v", 512, 384))
PLANS = ("ulysses=2", "ring=2")
SHARES = (2, 1)


def core_seconds(pool: Pool, trial: Trial, plan: ParallelPlan, calls: Sequence[ModelCall], turns: int) -> list[float]:
    """Of each rank, the median over turns."""
    pids, taken = pool.status()["pids"], list[list[float]]()
    for turn in range(turns + 1):
        before = [core_s(pid) for pid in pids]
        pool.run(trial.spec, plan, calls)
        if turn:
            taken.append([core_s(pid) - was for pid, was in zip(pids, before, strict=True)])
    return [statistics.median(each) for each in zip(*taken, strict=True)]


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    turns = parser.parse_args().turns
    devices, comfyui, rows = parse_devices("cpu:2").devices, find_comfyui(str(comfyui_path())), list[str]()
    with tempfile.TemporaryDirectory(prefix="unequal-") as folder, Pool(devices, threads_per_rank=1) as pool:
        pool.start()
        models = write_families(Path(folder) / "models", only=[name for name, *_ in MODELS]) / "diffusion_models"
        for name, width, height in MODELS:
            workload = Workload(width=width, height=height, text_tokens=TEXT_TOKENS)
            path, given = str(models / BY_NAME[name].file), {"steps": 1, "comfyui": comfyui.path, "device": devices[0]}
            with closing(Trial(path, "float32", workload, [ParallelPlan()], **given)) as trial:
                calls = [replace(call, options={**call.options, "timed": False}) for call in trial.calls]
                (alone, _) = core_seconds(pool, trial, ParallelPlan(), calls, turns)
                for text in PLANS:
                    plan = ParallelPlan.parse(text)
                    steps, told = {}, {}
                    for shares in ((), SHARES):
                        quick, slow = core_seconds(pool, trial, plan.with_shares(shares), calls, turns)
                        steps[shares], told[shares] = max(quick, 2 * slow), f"{quick:.3f} + {slow:.3f}"
                    ideal = alone * SHARES[0] / sum(SHARES)
                    cells = [name, text, f"{alone:.3f}", told[()], told[SHARES], f"{steps[()] / steps[SHARES]:.2f}x"]
                    cells += [f"{steps[SHARES] / ideal - 1:+.0%}", f"{alone / steps[()]:.2f}x"]
                    rows.append(f"| {' | '.join([*cells, f'{alone / steps[SHARES]:.2f}x'])} |")
                    sys.stderr.write(rows[-1] + "\n")
                pool.unload(trial.spec)
    lines = [
        "# Shares of unequal devices",
        "",
        "`PYTHONPATH=tests python -m benchmarks.unequal` writes this page: two CPU ranks of one thread, small files",
        f"with random weights, fp32, one step, medians of {turns}. Core seconds of each rank are measured (load",
        f"{os.getloadavg()[0]:.0f} on {os.cpu_count()} cores, others used the machine); the second rank's count",
        "twice, as if it had half the speed. A step takes as long as the slower rank. Waiting and links are not in it.",
        "",
        "| model | plan | one rank, s | equal, s | 2:1, s | quicker by shares | above ideal | equal | 2:1 |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        *rows,
        "",
        "The last two columns are over one rank. The ideal is two thirds of what one rank takes alone, with nothing",
        "for the exchange. Targets: at least 1.25x quicker than equal shares, and within 8 % of the ideal.",
    ]
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
