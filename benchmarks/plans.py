"""Every plan of up to eight ranks in one set of workers: its error, what it sends, what each rank holds.

    python -m benchmarks.plans [--devices cpu:8]

The model is small and random, with gates of O(1); the reference model is the unmodified diffusers model. A step is two
calls of the model, as cond and uncond, of 77 and 33 text tokens and 15 x 17 image tokens. Writes benchmarks/plans.md.
"""

import argparse
import platform
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from parallel_runtime.checkpoint import ModelSpec, read_header
from parallel_runtime.cli.verify import PlanRunner
from parallel_runtime.cli.workload import Workload, relative_error
from parallel_runtime.devices import parse_devices
from parallel_runtime.models.flux.config import FluxConfig
from parallel_runtime.models.flux.reference import ReferenceModel
from parallel_runtime.models.flux.sample import sample_config, write_sample
from parallel_runtime.plan import MAX_RANKS, ParallelPlan, heads_error
from parallel_runtime.pool.pool import Pool

TARGET = Path(__file__).with_name("plans.md")
TEXT_TOKENS = (77, 33)
COLUMNS = ("plan", "relative error", "collectives a step", "bytes sent a step", "weight bytes sent", "weights, bytes")
DEGREES = range(1, MAX_RANKS + 1)


def plans(num_heads: int) -> Iterator[ParallelPlan]:
    """All plans without PipeFusion, each with replicated weights and, where ranks can share them, sharded ones."""
    for data in DEGREES:
        for cfg in DEGREES:
            for ring in DEGREES:
                for ulysses in DEGREES:
                    if data * cfg * ring * ulysses > MAX_RANKS or heads_error(ulysses, num_heads):
                        continue
                    degrees = {"data": data, "cfg": cfg, "ring": ring, "ulysses": ulysses}
                    yield ParallelPlan(**degrees)
                    if cfg * ring * ulysses > 1:
                        yield ParallelPlan(**degrees, weights="sharded")


def row(pool: Pool, spec: ModelSpec, plan: ParallelPlan, calls: list[dict], expected: list[torch.Tensor]) -> str:
    """One plan's line. Ranks differ where lengths do: the most of any rank is given."""
    runner = PlanRunner(pool, spec, plan, options={})
    outs = runner.run(calls)
    error = max(relative_error(*pair) for pair in zip(outs, expected, strict=True))
    held = pool.load(spec, plan).parameter_bytes[: plan.ranks]
    ranks = [(rank.collectives, rank.sent_bytes, rank.weight_bytes) for rank in runner.ranks]
    counted = (*map(max, zip(*ranks, strict=True)), max(held))
    return f"| {plan.name} | {error:.1e} | " + " | ".join(f"{number:,}" for number in counted) + " |"


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="cpu:8")
    devices = parse_devices(parser.parse_args().devices).devices
    with tempfile.TemporaryDirectory() as folder, Pool(devices, threads_per_rank=1) as pool:
        path = Path(folder) / "sample.safetensors"
        write_sample(path, sample_config())
        spec = ModelSpec.of(path)
        config = FluxConfig.from_header(read_header(spec.path))
        sizes = [Workload(width=240, height=272, text_tokens=count, seed=count) for count in TEXT_TOKENS]
        calls = [size.tensors(config) for size in sizes]
        reference_model = ReferenceModel(spec.path, dtype=torch.float32)
        expected = [reference_model(call) for call in calls]
        rows = [
            row(pool, spec, plan, calls, expected) for plan in plans(config.num_heads) if plan.ranks <= len(devices)
        ]
    about = (
        f"{len(rows)} plans, torch {torch.__version__}, {platform.machine()}, {len(devices)} ranks on {devices[0].kind}"
    )
    head = (f"| {' | '.join(COLUMNS)} |", f"|{' --- |' * len(COLUMNS)}")
    TARGET.write_text("\n".join((f"# Plans\n\n{__doc__}\n{about}.\n", *head, *rows, "")), encoding="utf-8")


if __name__ == "__main__":
    main()
