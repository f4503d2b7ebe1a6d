"""Every kind of plan with every kind of run, and what CPU ranks that know no rules make of the same run.

Owns the cases and the reference. Knows no stand-in: whoever runs the cases says on which pool and with which options.
"""

import random
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from host.hosted_runs import asking, host_loop, make_run, with_options
from host.tiny_hosted import spec_of, write_tiny
from parallel_runtime.checkpoint import ModelSpec
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.pool import Pool
from parallel_runtime.proof import relative_error

RUNS = {
    "one side": {},
    "two sides of unequal texts, two images": {"batch": 2, "texts": (7, 12)},
    "a mask, an odd length": {"mask": True, "texts": (5, 6), "size": (3, 6, 10)},
}
PLANS = (
    *("ulysses=1", "ulysses=2", "ulysses=3", "ring=2", "ring=3", "ulysses=2,ring=2", "cfg=2,ulysses=2"),
    *("data=2,cfg=2", "pipefusion=2", "pipefusion=3,patches=4", "pipefusion=2,ring=2", "pipefusion=2,ulysses=2"),
)
CHOICES = {
    "plan": PLANS,
    "weights": ("replicated", "sharded", "offloaded"),
    "dtype": ("float32", "bfloat16", "float16"),
    "run": tuple(RUNS),
    "worker_loop": (True, False),
}
ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class Case:
    """A plan, who has the sampler's loop, and the run."""

    plan: str
    weights: str = "replicated"
    worker_loop: bool = True
    run: str = "one side"

    @property
    def parallel_plan(self) -> ParallelPlan:
        """The plan with its weights."""
        return ParallelPlan.parse(f"{self.plan},weights={self.weights}")


def drawn(choices: Mapping[str, Sequence[object]], *, rounds: int, chance: random.Random) -> list[dict[str, object]]:
    """Each plan so many times, with a draw of the other choices, but draws of weights that the plan cannot share."""
    rows = [
        {name: chance.choice(values) for name, values in choices.items()} | {"plan": plan}
        for plan in choices["plan"] * rounds
    ]
    return [row for row in rows if _is_plan(f"{row['plan']},weights={row['weights']}")]


def _is_plan(text: str) -> bool:
    try:
        ParallelPlan.parse(text)
    except ValueError:
        return False
    return True


def write_model(folder: Path) -> ModelSpec:
    """A model that up to three stages can split, whose heads of 16 the fused kernels take."""
    return spec_of(write_tiny(folder / "model.safetensors", dim=192, num_layers=3))


class Reference:
    """What CPU ranks over gloo compute: one rank, or under a pipeline as many as it has, with the keys that it has.

    tests/models and tests/runtime hold those to ComfyUI's bare module.
    """

    def __init__(self, pool: Pool, spec: ModelSpec) -> None:
        self._pool, self.spec = pool, spec
        self._found: dict[tuple[ParallelPlan, str], tuple[torch.Tensor, list[torch.Tensor]]] = {}
        self._limits = {"float32": 1e-5}  # sums in another order

    def limit(self, dtype: str) -> float:
        """What a result in `dtype` may differ by: in halves twice what one CPU rank does here, in any of the runs."""
        if dtype not in self._limits:
            one_rank = [self.error(self._pool, Case(plan="data=1", run=run), {}, dtype=dtype) for run in RUNS]
            self._limits[dtype] = 2 * max(one_rank)
        return self._limits[dtype]

    def of(self, case: Case) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The result and every step's denoised latent."""
        plan = ParallelPlan.parse(case.plan) if case.parallel_plan.pipefusion > 1 else ParallelPlan()
        key = (plan, case.run)  # its name does not tell the patches
        if key not in self._found:
            run = make_run(**RUNS[case.run])
            self._found[key] = host_loop(asking(self._pool, self.spec, plan, run=f"{plan.describe()} {case.run}"), run)
        return self._found[key]

    def error(self, pool: Pool, case: Case, options: Mapping[str, object], *, dtype: str = "") -> float:
        """How far a case's result and previews are from that. `options` are of each of its calls."""
        expected, previews = self.of(case)
        plan, run = case.parallel_plan, with_options(make_run(**RUNS[case.run]), **options)
        spec = replace(self.spec, dtype=dtype or self.spec.dtype)
        seen: list[torch.Tensor] = []
        if case.worker_loop:
            out = pool.sample(spec, plan, run, on_step=lambda _, x: seen.append(x.clone())).out
        else:
            out, seen = host_loop(asking(pool, spec, plan, run=f"{case} {uuid.uuid4().hex}", **options), run)
        assert len(seen) == len(previews)
        # NaN is the greatest error, and `max` would pass it over.
        errors = [relative_error(*pair) for pair in zip((out, *seen), (expected, *previews), strict=True)]
        return max(error if error == error else torch.inf for error in errors)
