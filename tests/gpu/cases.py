"""Every kind of plan with every kind of run, pair by pair, and what one process makes of the same run.

Owns the cases and the reference. Knows no stand-in: whoever runs the cases says on which pool and with which options.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from runtime.in_worker_runs import host_loop, make_run
from runtime.stale_model import StaleModel

from parallel_runtime.checkpoint import ModelSpec, read_header
from parallel_runtime.cli.workload import relative_error
from parallel_runtime.models.flux.config import FluxConfig
from parallel_runtime.models.flux.reference import ReferenceModel
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.calls import ModelCall
from parallel_runtime.pool.in_worker_sampling import InWorkerRun
from parallel_runtime.pool.pool import Pool

RUNS = {
    "one side": {},
    "two sides of unequal texts, two images": {"batch": 2, "sides": (7, 12)},
    "a mask, references, an odd length": {"mask": True, "references": 31, "sides": (5, 6)},
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A plan, who has the sampler's loop, and the run. `gathers`: keys go round in one message where they are few."""

    plan: str
    weights: str = "replicated"
    in_workers: bool = True
    run: str = "one side"
    gathers: bool = False

    @property
    def parallel_plan(self) -> ParallelPlan:
        """The plan with its weights."""
        return ParallelPlan.parse(f"{self.plan},weights={self.weights}")


def is_plan(row: Mapping[str, object]) -> bool:
    """Whether a plan can have such weights: those of one rank cannot be sharded."""
    try:
        ParallelPlan.parse(f"{row['plan']},weights={row['weights']}")
    except ValueError:
        return False
    return True


def pairs(
    choices: Mapping[str, Sequence[object]], *, allowed: Callable[[Mapping[str, object]], bool]
) -> list[dict[str, object]]:
    """Few combinations in which any two choices of different kinds meet; each is the one that brings the most pairs.

    `allowed` judges combinations of the first two kinds.
    """
    names = list(choices)
    left = dict.fromkeys(
        ((one, a), (other, b))
        for one, other in itertools.combinations(names, 2)
        for a in choices[one]
        for b in choices[other]
        if (one, other) != tuple(names[:2]) or allowed({one: a, other: b})
    )
    found = []
    while left:
        row = dict(next(iter(left)))
        for name in names:
            if name not in row:
                fit = [{**row, name: value} for value in choices[name]]
                fit = [each for each in fit if not set(names[:2]) <= set(each) or allowed(each)]
                row = max(fit, key=lambda each: len(_met(each, left)))
        for pair in _met(row, left):
            del left[pair]
        found.append({name: row[name] for name in names})
    return found


def _met(row: Mapping[str, object], left: Mapping) -> list:
    return [pair for pair in itertools.permutations(row.items(), 2) if pair in left]


def error_of(pool: Pool, spec: ModelSpec, case: Case, options: Mapping[str, object]) -> float:
    """How far a case's result and previews are from one process's. `options` are of each of its calls."""
    plan, run = case.parallel_plan, _run_of(spec.path, case.run)
    options = {**options, "ungathered": not case.gathers}
    conds = tuple(replace(cond, options={**cond.options, **options}) for cond in run.conds)
    patches = plan.num_patches if plan.pipefusion > 1 else 0
    expected, previews = _reference(spec.path, case.run, patches, case.in_workers or not patches)
    seen: list[torch.Tensor] = []
    if case.in_workers:
        ours = replace(run, conds=conds)
        out = pool.sample(spec, plan, ours, on_step=lambda _, x: seen.append(x.clone())).out
    else:
        out, seen = host_loop(_Calls(pool, spec, plan, conds), run)
    assert len(seen) == len(previews)
    # NaN is the greatest error, and `max` would pass it over.
    errors = [relative_error(*pair) for pair in zip((out, *seen), (expected, *previews), strict=True)]
    return max(error if error == error else torch.inf for error in errors)


class _Calls:
    """A plan as the host's loop calls it, side by side, with the sides of a call in one request."""

    def __init__(self, pool: Pool, spec: ModelSpec, plan: ParallelPlan, conds: Sequence[ModelCall]) -> None:
        self._run = lambda calls: pool.run(spec, plan, calls).outs
        self._conds, self._ready = conds, []
        self._name = f"{plan.describe()} {id(self)}"  # another run starts with a warm-up of its own

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if not self._ready:
            self._ready = self._run([self._call(number, tensors) for number in range(len(self._conds))])
        return self._ready.pop(0)

    def _call(self, side: int, first: Mapping[str, torch.Tensor]) -> ModelCall:
        """A side's call with the latent's rows of the first side's."""
        cond = self._conds[side]
        img, rows = cond.tensors["img"].clone(), 72
        img[:, :rows] = first["img"][:, :rows]
        told = {"pipeline": {"run": self._name, "key": f"side {side}"}}
        tensors = {**cond.tensors, "img": img, "timesteps": first["timesteps"]}
        return replace(cond, tensors=tensors, options={**cond.options, **told})


@lru_cache(maxsize=8)
def _run_of(path: str, name: str) -> InWorkerRun:
    return make_run(FluxConfig.from_header(read_header(path)), **RUNS[name])


@lru_cache(maxsize=64)
def _reference(path: str, name: str, patches: int, in_workers: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """One process's result and previews, as stale as a pipeline of so many patches; exact with none."""
    run = _run_of(path, name)
    model: Callable[[Mapping], torch.Tensor] = ReferenceModel(path, dtype=torch.float32)
    if patches:
        # In a run of the workers all sides have the patches of the longest text.
        longest = max(cond.tensors["txt"].shape[1] for cond in run.conds) if in_workers else None
        sides = len(run.conds)
        model = StaleModel(path, patches=patches, warm_calls=1, sides=sides, longest_text=longest)
    return host_loop(model, run)
