"""What a change of a LoRA's strength costs beside a warm load: merged, and beside the weights; and a step's cost.

    python benchmarks/lora_change.py [--devices cpu:2] [--gib 1.0] [--runs 5]

Writes a random Flux-shaped bf16 file (hidden 1536, heads of 128) and a LoRA of rank 16 on every matrix of the blocks.
A warm load is of a file that the system has in memory, by workers that run. Prints Markdown; the medians of the runs.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402

from host.tiny_models import write_large_flux  # noqa: E402
from parallel_runtime.checkpoint import ModelSpec, read_header  # noqa: E402
from parallel_runtime.cli.verify import PlanRunner  # noqa: E402
from parallel_runtime.cli.workload import Workload  # noqa: E402
from parallel_runtime.devices import parse_devices  # noqa: E402
from parallel_runtime.models.flux.config import FluxConfig  # noqa: E402
from parallel_runtime.plan import ParallelPlan  # noqa: E402
from parallel_runtime.pool.pool import Pool  # noqa: E402
from parallel_runtime.weight_patch import PRISTINE, WeightPatch, WeightPatchSet  # noqa: E402

RANK = 16
COLUMNS = ("compute", "patches", "warm load s", "merged change s", "of a load", "taken back s")
COLUMNS += ("beside: first s", "beside: change s", "step s", "step beside s")
HEAD = f"| {' | '.join(COLUMNS)} |\n{'| --- ' * len(COLUMNS)}|"


def lora(config: FluxConfig) -> tuple[WeightPatch, ...]:
    """A LoRA on every matrix inside the blocks."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for name, shape in config.expected_shapes().items():
        if len(shape) == 2 and "_blocks." in name and "mod" not in name:
            up = 0.01 * torch.randn(shape[0], RANK, generator=generator)
            down = torch.randn(RANK, shape[1], generator=generator)
            values = (up.bfloat16(), down.bfloat16(), float(RANK), None)
            found.append(WeightPatch(key=name, kind="lora", strength=1.0, values=values))
    return tuple(found)


def took_s(call: Callable[[], object]) -> float:
    """Seconds of one call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def measure(pool: Pool, spec: ModelSpec, config: FluxConfig, *, runs: int) -> str:
    """One row of the table."""
    patches = lora(config)

    def at(strength: float, *, beside: bool) -> WeightPatchSet:
        changed = tuple(replace(patch, strength=strength) for patch in patches)
        return WeightPatchSet(f"{strength} {beside}", changed, beside)

    def change_s(strengths: list[float], *, beside: bool) -> float:
        asked = [at(each, beside=beside) for each in strengths]
        return statistics.median(took_s(partial(pool.patch, spec, each)) for each in asked)

    loads = []
    for _ in range(runs):
        loads.append(took_s(lambda: pool.load(spec)))
        pool.unload(spec)
    pool.load(spec)
    strengths = [0.1 * number for number in range(1, runs + 1)]
    change_s([0.05], beside=False)  # the first may have to take memory for what it merges
    merged_s = change_s(strengths, beside=False)
    back_s = took_s(lambda: pool.load(spec, patches=PRISTINE))
    first_s = change_s([0.05], beside=True)
    beside_s = change_s(strengths, beside=True)
    plain_step_s, beside_step_s = step_s(pool, spec, config, at(0.3, beside=True), runs=runs)
    load_s = statistics.median(loads)
    return (
        f"| {pool.load(spec).dtype} | {len(patches)} | {load_s:.3f} | {merged_s:.3f} | {merged_s / load_s:.0%} "
        f"| {back_s:.3f} | {first_s:.3f} | {beside_s:.4f} | {plain_step_s:.3f} | {beside_step_s:.3f} |"
    )


def step_s(
    pool: Pool, spec: ModelSpec, config: FluxConfig, beside: WeightPatchSet, *, runs: int
) -> tuple[float, float]:
    """Median seconds of a step without a LoRA and with one beside the weights, taken in turns. 512 x 512 pixels."""
    runner = PlanRunner(pool, spec, ParallelPlan(ulysses=len(pool.devices)), options={})
    tensors = Workload(width=512, height=512, text_tokens=128).tensors(config)
    taken: dict[str, list[float]] = {"": [], beside.name: []}
    for _ in range(runs + 2):
        for patches in (PRISTINE, beside):
            runner.patches = patches
            pool.load(spec, patches=patches)
            taken[patches.name].append(took_s(lambda: runner(tensors)))
    plain, branched = (statistics.median(times[2:]) for times in taken.values())
    return plain, branched


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="cpu:2")
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = write_large_flux(Path(folder) / "large.safetensors", gib=arguments.gib, hidden=1536, single=1)
        config = FluxConfig.from_header(read_header(path))
        print(f"torch {torch.__version__}, {arguments.devices}, {path.stat().st_size / 2**30:.2f} GiB\n")  # noqa: T201
        print(HEAD)  # noqa: T201
        for dtype in ("default", "float32"):
            with Pool(parse_devices(arguments.devices).devices, threads_per_rank=1) as pool:
                pool.start()
                print(measure(pool, ModelSpec.of(path, dtype), config, runs=arguments.runs), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
