"""Every plan against one process over ranks, image sizes, text lengths and batches: one table, and the worst cell.

    python benchmarks/parity_table.py

Runs on eight CPU ranks with a small random model of 24 heads; the judge is the unmodified diffusers model. Each cell is
the worst relative error of all plans with that many ranks, over all ranks' rows.
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from parallel_runtime.checkpoint import ModelSpec
from parallel_runtime.cli.sample_model import sample_config, write_sample
from parallel_runtime.cli.verify import FP32_TOLERANCE, PlanRunner
from parallel_runtime.cli.workload import Workload, error_by_rank, worst
from parallel_runtime.devices import parse_devices
from parallel_runtime.oracle import Oracle
from parallel_runtime.plan import ParallelPlan, heads_error
from parallel_runtime.pool.pool import Pool

RANKS = (1, 2, 3, 4, 5, 6, 8)
SIZES = {"square 512x512": (512, 512), "odd 392x248": (392, 248), "tiny 16x32": (16, 32)}
TEXTS = (1, 77, 512)
BATCHES = (1, 3)


def plans(ranks: int, heads: int) -> list[ParallelPlan]:
    """Every product of ring and ulysses that makes this many ranks and fits the heads."""
    degrees = [degree for degree in range(1, ranks + 1) if ranks % degree == 0]
    return [
        ParallelPlan(ulysses=degree, ring=ranks // degree) for degree in degrees if heads_error(degree, heads) is None
    ]


def main() -> int:
    """Print the table; 1 when a cell is out of tolerance."""
    config = sample_config()
    cells: dict[str, float] = {}
    print(f"{'image, text, batch':32}" + "".join(f"{ranks:>10}" for ranks in RANKS) + "   ranks")  # noqa: T201
    with tempfile.TemporaryDirectory() as folder, Pool(parse_devices("cpu:8").devices, threads_per_rank=1) as pool:
        path = Path(folder) / "sample.safetensors"
        write_sample(path, config)
        spec, judge = ModelSpec.of(path), Oracle(str(path))
        for size, (width, height) in SIZES.items():
            for text in TEXTS:
                for batch in BATCHES:
                    workload = Workload(width=width, height=height, text_tokens=text, batch=batch)
                    tensors = workload.tensors(config)
                    expected = judge(tensors)
                    row = f"{size}, {text}, {batch}"
                    line = []
                    for ranks in RANKS:
                        errors = []
                        for plan in plans(ranks, config.num_heads):
                            result = PlanRunner(pool, spec, plan, options={})(tensors)
                            errors += error_by_rank(result, expected, plan=plan, text_tokens=text)
                        line.append(worst(errors))
                        cells[f"{row}, {ranks} ranks"] = line[-1]
                    print(f"{row:32}" + "".join(f"{error:10.1e}" for error in line), flush=True)  # noqa: T201
    cell = max(cells, key=lambda name: cells[name])
    print(f"worst cell: {cell}: {cells[cell]:.2e}, tolerance {FP32_TOLERANCE:.0e}")  # noqa: T201
    return int(not all(error <= FP32_TOLERANCE for error in cells.values()))


if __name__ == "__main__":
    sys.exit(main())
