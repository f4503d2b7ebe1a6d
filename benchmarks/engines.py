"""Flux.1 on both engines: blocks of our own, and ComfyUI's modules with hooks, in turn in one pool.

    python benchmarks/engines.py COMFYUI [--pairs 15] [--write FILE]

The same file, sizes and threads; a step is a call of the pool with one prompt. What the host does around it (making
tokens of a latent) is left out for blocks of our own and inside ComfyUI's module. Both are first held to their judges.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from benchmarks.peers.shapes import Shape  # noqa: E402
from benchmarks.share.real import core_s  # noqa: E402
from parallel_runtime.cli.hosted_trial import HostedTrial  # noqa: E402
from parallel_runtime.cli.trial import OwnTrial, Trial  # noqa: E402
from parallel_runtime.cli.verify import FP32_TOLERANCE, PlanRunner  # noqa: E402
from parallel_runtime.cli.workload import Workload, relative_error, worst  # noqa: E402
from parallel_runtime.devices import parse_devices  # noqa: E402
from parallel_runtime.models.flux.family import FLUX  # noqa: E402
from parallel_runtime.models.flux.sample import sample_config, write_sample  # noqa: E402
from parallel_runtime.plan import ParallelPlan  # noqa: E402
from parallel_runtime.pool.pool import Pool  # noqa: E402

# One bound by arithmetic, one by the overhead of its many small operations. ComfyUI takes heads of 128 for granted.
SHAPES = (
    Shape(
        name="compute",
        config=sample_config(heads=4, head_dim=128, depth=2, depth_single=4),
        workload=Workload(width=1024, height=512, text_tokens=128),
    ),
    Shape(
        name="overhead",
        config=sample_config(heads=2, head_dim=128, depth=19, depth_single=38),
        workload=Workload(width=128, height=128, text_tokens=16),
    ),
)
PLANS = (ParallelPlan(), ParallelPlan(ulysses=2))
WARMUP = 2
HEAD = (
    "model",
    "ranks",
    "our blocks ms",
    "ComfyUI's ms",
    "clock, of each pair",
    "quartiles",
    "core, of each pair",
    "quartiles",
)


def main() -> None:
    """Print the table, a row as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comfyui", help="ComfyUI's folder")
    parser.add_argument("--pairs", type=int, default=15, help="of calls, for each row")
    parser.add_argument("--write", type=Path, help="append the rows to this file")
    arguments = parser.parse_args()
    lines = [f"| {' | '.join(HEAD)} |", f"|{' --- |' * len(HEAD)}"]
    print(*lines, sep="\n", flush=True)  # noqa: T201
    for shape in SHAPES:
        for row in rows(shape, arguments.comfyui, pairs=arguments.pairs):
            lines.append(f"| {' | '.join(row)} |")
            print(lines[-1], flush=True)  # noqa: T201
    lines.append(f"\ntorch {torch.__version__}, {os.cpu_count()} cores, {arguments.pairs} pairs a row.")
    print(lines[-1])  # noqa: T201
    if arguments.write is not None:
        with arguments.write.open("a", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")


def rows(shape: Shape, comfyui: str, *, pairs: int) -> list[tuple[str, ...]]:
    """A row for each plan."""
    found = []
    with tempfile.TemporaryDirectory(prefix="engines-") as folder:
        path = str(Path(folder) / "flux.safetensors")
        write_sample(path, shape.config)
        devices = parse_devices("cpu:2").devices
        given = (path, "float32", shape.workload, PLANS)
        with (
            closing(OwnTrial(FLUX, *given, steps=1, on_cpu=True)) as own,
            closing(HostedTrial(*given, steps=1, comfyui=comfyui, device=devices[0])) as hosted,
            Pool(devices, threads_per_rank=1) as pool,
        ):
            for plan in PLANS:
                steps = [one_step(pool, trial, plan) for trial in (own, hosted)]
                pids = pool.status()["pids"]
                found.append((shape.text, str(plan.ranks), *compared(*steps, pids=pids, pairs=pairs)))
    return found


def one_step(pool: Pool, trial: Trial, plan: ParallelPlan) -> Callable[[], object]:
    """A call of the pool under a plan, whose result was found equal to the reference model's."""
    runner = PlanRunner(pool, trial.spec, plan, options={})
    results, references = trial.results(runner.run, torch.float32), trial.references(torch.float32, torch.float32)
    error = worst([relative_error(*pair) for pair in zip(results, references, strict=True)])
    if error > FP32_TOLERANCE:
        raise ValueError(
            f"{plan.name} differs from {trial.reference_model} by {error:.1e}; times of a wrong result say nothing"
        )
    calls = trial.calls[:1]
    return lambda: runner.run(calls)


def compared(
    first: Callable[[], object], second: Callable[[], object], *, pids: list[int], pairs: int
) -> tuple[str, ...]:
    """Median milliseconds of both, and of the ratio of each pair its median and quartiles: by the clock, on a core."""
    taken = []
    for number in range(pairs + WARMUP):
        order = (first, second) if number % 2 else (second, first)
        took = {call: took_ms(call, pids) for call in order}
        taken.append((*took[first], *took[second]))
    taken = taken[WARMUP:]
    clock = ratios(each[2] / each[0] for each in taken)
    core = ratios(each[3] / each[1] for each in taken)
    clocks = [f"{statistics.median(each[place] for each in taken):.1f}" for place in (0, 2)]
    return *clocks, *clock, *core


def ratios(found: Iterable[float]) -> tuple[str, str]:
    """Their median and quartiles."""
    low, middle, high = statistics.quantiles(found, n=4)
    return f"{middle:.3f}x", f"{low:.3f} to {high:.3f}"


def took_ms(call: Callable[[], object], pids: list[int]) -> tuple[float, float]:
    """Milliseconds of one call by the clock, and for which the busiest rank had a core."""
    before = [core_s(pid) for pid in pids]
    began = time.perf_counter()
    call()
    clock = time.perf_counter() - began
    return 1000 * clock, 1000 * max(core_s(pid) - was for pid, was in zip(pids, before, strict=True))


if __name__ == "__main__":
    main()
