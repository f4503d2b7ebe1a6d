"""What a soak asks: tiny models, sizes, plans and LoRAs, and the right answer to each from the unmodified diffusers.

Some are single calls of the model, some whole sampling runs inside the workers.

Owns the files and the references. A LoRA's reference is a file of its own, merged here by the formula, so that the
workers' way to merge it has nothing to do with it.
"""

import itertools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from runtime.in_worker_runs import host_loop, make_run
from safetensors.torch import load_file, save_file

from parallel_runtime.checkpoint import ModelSpec, read_header
from parallel_runtime.cli.workload import Workload
from parallel_runtime.models.flux.config import FluxConfig
from parallel_runtime.models.flux.reference import ReferenceModel
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.calls import ModelCall
from parallel_runtime.pool.in_worker_sampling import InWorkerRun
from parallel_runtime.pool.pool import Pool
from parallel_runtime.weight_patch import PRISTINE, WeightPatchSet

from .soak_models import LORA_RANK, lora, write_model

WORKLOADS = (
    Workload(width=64, height=64, text_tokens=7),
    Workload(width=200, height=136, text_tokens=19),
    Workload(width=128, height=96, text_tokens=3, batch=2),
    Workload(width=448, height=320, text_tokens=33),
)
RUNS: tuple[Mapping, ...] = (
    {"mask": True, "references": 30, "sides": (5,)},
    {"batch": 3, "sides": (7, 12)},
)
PLANS = (
    *("ulysses=1", "ulysses=2", "ring=2", "cfg=2", "data=2", "ulysses=2,weights=sharded", "cfg=2,weights=sharded"),
    *("ring=2,weights=offloaded", "ring=3", "ulysses=2,ring=2", "ulysses=4", "ring=4", "data=2,ring=2"),
    *("data=2,ulysses=2,weights=sharded", "pipefusion=2,warmup_steps=3", "pipefusion=2,ulysses=2,warmup_steps=3"),
)  # all exact: a pipeline is in its warm-up, which the runs here do not outlast


@dataclass(frozen=True)
class Case:
    """One call of the model, or one whole run, and the right answer."""

    spec: ModelSpec
    patches: WeightPatchSet
    work: ModelCall | InWorkerRun
    reference: torch.Tensor

    def ask(self, pool: Pool, plan: ParallelPlan, options: Mapping, check: Callable[[], None] | None) -> torch.Tensor:
        """The pool's answer; `options` go to every call. Raises PoolError and what `check` raises."""
        around = {"patches": self.patches, "check_cancelled": check}
        if isinstance(self.work, InWorkerRun):
            conds = tuple(replace(cond, options=options) for cond in self.work.conds)
            return pool.sample(self.spec, plan, replace(self.work, conds=conds), **around).out
        return pool.run(self.spec, plan, [replace(self.work, options=options)], **around).outs[0]


class Cases:
    """Every model with every LoRA in every size; the references are made once, here."""

    def __init__(self, folder: Path, *, num_ranks: int, num_models: int = 2) -> None:
        self.plans = [plan for plan in map(ParallelPlan.parse, PLANS) if plan.ranks <= num_ranks]
        self.models = [write_model(folder / f"model{index}.safetensors", seed=index) for index in range(num_models)]
        self.loras = [PRISTINE, lora("one", seed=1, strength=0.8), lora("two", seed=2, strength=-1.1)]
        self.loras.append(lora("beside", seed=1, strength=0.4, side_branch=True))
        self.cases = [case for spec in self.models for each in self.loras for case in _cases(spec, each, folder)]

    def pick(self, chance: random.Random) -> tuple[Case, ParallelPlan]:
        """Any of them, under any plan."""
        return chance.choice(self.cases), chance.choice(self.plans)

    def all(self, chance: random.Random) -> list[tuple[Case, ParallelPlan]]:
        """Each of them under each plan, once, in a random order."""
        every = list(itertools.product(self.cases, self.plans))
        return chance.sample(every, k=len(every))


def _cases(spec: ModelSpec, changes: WeightPatchSet, folder: Path) -> list[Case]:
    weights = load_file(spec.path)
    for patch in changes.patches:
        up, down = patch.values[0], patch.values[1]
        weights[patch.key] = weights[patch.key] + patch.strength * 2.0 / LORA_RANK * (up @ down)
    merged = folder / f"merged_{changes.name}_{Path(spec.path).name}"
    save_file(weights, merged)
    reference_model, config = ReferenceModel(str(merged)), FluxConfig.from_header(read_header(spec.path))
    made = []
    for workload in WORKLOADS:
        tensors = workload.tensors(config)
        reference = reference_model(tensors)
        call = ModelCall(tensors=tensors, out_shape=tuple(reference.shape), out_dtype=torch.float32)
        made.append(Case(spec, changes, call, reference))
    for kind in RUNS:
        run = make_run(config, **kind)
        made.append(Case(spec, changes, run, host_loop(reference_model, run)[0]))
    merged.unlink()
    return made
