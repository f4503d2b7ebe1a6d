"""What a soak asks: tiny models, sizes, plans and LoRAs, and the right answer to each from one rank of its own.

Some are single calls of the model, some whole sampling runs inside the workers, which one rank is asked step by step.

Owns the files and the references. A LoRA's reference is a file of its own, merged here by the formula, so that the
workers' way to merge it has nothing to do with it.
"""

import itertools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from host.hosted_runs import asking, host_loop, make_run, with_options
from host.tiny_hosted import call, spec_of
from parallel_runtime.checkpoint import ModelSpec
from parallel_runtime.devices import parse_devices
from parallel_runtime.model_call import ModelCall
from parallel_runtime.plan import ParallelPlan
from parallel_runtime.pool.calls import WorkerLoopRun
from parallel_runtime.pool.pool import Pool
from parallel_runtime.weight_delta import PRISTINE, WeightDeltas

from .soak_models import LORA_RANK, lora, write_model

CALLS: tuple[Mapping, ...] = (
    {"text": 7},
    {"text": 19, "size": (3, 10, 14)},
    {"text": 3, "batch": 2, "size": (1, 8, 12)},
    {"text": 33, "size": (5, 20, 28)},
)
RUNS: tuple[Mapping, ...] = ({"mask": True, "texts": (5,), "size": (3, 6, 10)}, {"batch": 3, "texts": (7, 12)})
PLANS = (
    *("ulysses=1", "ulysses=2", "ring=2", "cfg=2", "data=2", "ulysses=2,weights=sharded", "cfg=2,weights=sharded"),
    *("ring=2,weights=offloaded", "ring=3", "ulysses=2,ring=2", "ulysses=4", "ring=4", "data=2,ring=2"),
    *("data=2,ulysses=2,weights=sharded", "pipefusion=2,warmup_steps=3", "pipefusion=2,ulysses=2,warmup_steps=3"),
)  # all exact: a pipeline is in its warm-up, which the runs here do not outlast


@dataclass(frozen=True)
class Case:
    """One call of the model, or one whole run, and the right answer."""

    spec: ModelSpec
    deltas: WeightDeltas
    work: ModelCall | WorkerLoopRun
    reference: torch.Tensor

    def ask(self, pool: Pool, plan: ParallelPlan, options: Mapping, check: Callable[[], None] | None) -> torch.Tensor:
        """The pool's answer; `options` go to every call. Raises PoolError and what `check` raises."""
        around = {"deltas": self.deltas, "check_cancelled": check}
        if isinstance(self.work, WorkerLoopRun):
            return pool.sample(self.spec, plan, with_options(self.work, **options), **around).out
        asked = replace(self.work, options={**self.work.options, **options})
        return pool.run(self.spec, plan, [asked], **around).outs[0]


class Cases:
    """Every model with every LoRA in every size; the references are made once, here."""

    def __init__(self, folder: Path, *, num_ranks: int, num_models: int = 2) -> None:
        self.plans = [plan for plan in map(ParallelPlan.parse, PLANS) if plan.ranks <= num_ranks]
        self.models = [write_model(folder / f"model{index}.safetensors", seed=index) for index in range(num_models)]
        self.loras = [PRISTINE, lora("one", seed=1, strength=0.8), lora("two", seed=2, strength=-1.1)]
        self.loras.append(lora("beside", seed=1, strength=0.4, side_branch=True))
        with Pool(parse_devices("cpu:1").devices, threads_per_rank=1) as pool:
            self.cases = [case for spec in self.models for each in self.loras for case in _cases(pool, spec, each)]

    def pick(self, chance: random.Random) -> tuple[Case, ParallelPlan]:
        """Any of them, under any plan."""
        return chance.choice(self.cases), chance.choice(self.plans)

    def all(self, chance: random.Random) -> list[tuple[Case, ParallelPlan]]:
        """Each of them under each plan, once, in a random order."""
        every = list(itertools.product(self.cases, self.plans))
        return chance.sample(every, k=len(every))


def _cases(pool: Pool, spec: ModelSpec, changes: WeightDeltas) -> list[Case]:
    weights = load_file(spec.path)
    for patch in changes.deltas:
        up, down = patch.values[0], patch.values[1]
        weights[patch.key] = weights[patch.key] + patch.strength * 2.0 / LORA_RANK * (up @ down)
    path = Path(spec.path)
    merged = path.with_name(f"merged_{changes.name}_{path.name}")
    save_file(weights, merged, metadata=_metadata(path))
    one_rank = asking(pool, spec_of(merged), ParallelPlan())
    made: list[Case] = []
    for kind in CALLS:
        asked = call(**kind)
        made.append(Case(spec, changes, asked, one_rank([asked])[0]))
    for kind in RUNS:
        run = make_run(**kind)
        made.append(Case(spec, changes, run, host_loop(one_rank, run)[0]))
    pool.unload(spec_of(merged))
    merged.unlink()
    return made


def _metadata(path: Path) -> dict[str, str]:
    """The file's, which says its sizes."""
    with safe_open(path, "pt") as file:
        return dict(file.metadata())
