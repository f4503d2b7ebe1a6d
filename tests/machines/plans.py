"""Every plan over several machines beside one process: both engines, weights replicated and sharded.

Owns which plans, and the comparison. Calls, references and tolerances are `verify`'s.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from parallel_runtime.checkpoint import ModelSpec, read_header
from parallel_runtime.cli.verify import FP32_TOLERANCE, PlanRunner, control_options
from parallel_runtime.cli.workload import Workload, relative_error
from parallel_runtime.models.flux.config import FluxConfig
from parallel_runtime.models.flux.reference import ReferenceModel
from parallel_runtime.models.flux.sample import sample_config, write_sample
from parallel_runtime.plan import MAX_RANKS, ParallelPlan, refuse_unfit_machines
from parallel_runtime.pool.pool import Pool

TEXT_TOKENS = (77, 33)
SIZE = {"width": 240, "height": 272}  # 15 x 17 tokens, which no degree divides
DEGREES = (1, 2, 3, 4, 5, 6, 7, 8)
HEADS = 4


def plans(ranks_by_machine: Sequence[int]) -> Iterator[ParallelPlan]:
    """All that use ranks of a further machine, with replicated weights and, where ranks can share them, sharded."""
    degrees = [
        {"data": data, "cfg": cfg, "pipefusion": pipe, "ring": ring, "ulysses": ulysses}
        for data in DEGREES
        for cfg in (1, 2)
        for pipe in (1, 2, 3, 4)
        for ring in DEGREES
        for ulysses in (1, 2, 4)
        if ranks_by_machine[0] < data * cfg * pipe * ring * ulysses <= MAX_RANKS
    ]
    for each in degrees:
        for weights in ("replicated", "sharded"):
            warmup = {"warmup_steps": 1} if each["pipefusion"] > 1 else {}
            try:
                plan = ParallelPlan(**each, **warmup, weights=weights)
                refuse_unfit_machines(plan, ranks_by_machine)
            except ValueError:
                continue
            yield plan


class Flux:
    """A small model with gates of O(1), two calls of unequal text, and what unmodified diffusers makes of them."""

    def __init__(self, path: Path) -> None:
        write_sample(path, sample_config(heads=4, depth=2, depth_single=2))
        self.spec = ModelSpec.of(path)
        config = FluxConfig.from_header(read_header(self.spec.path))
        self.sizes = [Workload(**SIZE, text_tokens=count, seed=count) for count in TEXT_TOKENS]
        self.calls = [size.tensors(config) for size in self.sizes]
        reference = ReferenceModel(self.spec.path, dtype=torch.float32)
        self.expected = [reference(call) for call in self.calls]

    def error(self, pool: Pool, plan: ParallelPlan, *, wrong: bool = False) -> float:
        """The largest relative error of a step."""
        options = control_options(plan, self.sizes[0]) if wrong else {}
        outs = PlanRunner(pool, self.spec, plan, options=options).run(self.calls)
        return max(relative_error(*pair) for pair in zip(outs, self.expected, strict=True))

    def problem(self, pool: Pool, plan: ParallelPlan) -> str:
        """ "" where the plan is exact."""
        error = self.error(pool, plan)
        return "" if error <= FP32_TOLERANCE else f"relative error {error:.1e}, at most {FP32_TOLERANCE:.0e}"
