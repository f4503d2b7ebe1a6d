"""What a soak asks: tiny models, sizes, plans and LoRAs, and the right answer to each from the unmodified diffusers.

Owns the files and the references. A LoRA's reference is a file of its own, merged here by the formula, so that the
workers' way to merge it has nothing to do with it.
"""

import random
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from parallel_runtime.adapters.flux_config import FluxConfig
from parallel_runtime.checkpoint import ModelSpec, read_header
from parallel_runtime.cli.workload import Workload
from parallel_runtime.oracle import Oracle
from parallel_runtime.patch import PRISTINE, PatchSet
from parallel_runtime.plan import ParallelPlan

from .soak_models import LORA_RANK, lora, write_model

WORKLOADS = (
    Workload(width=64, height=64, text_tokens=7),
    Workload(width=200, height=136, text_tokens=19),
    Workload(width=128, height=96, text_tokens=3, batch=2),
    Workload(width=448, height=320, text_tokens=33),
)


@dataclass(frozen=True)
class Case:
    """One call of the model and the right answer."""

    spec: ModelSpec
    patches: PatchSet
    tensors: dict[str, torch.Tensor]
    reference: torch.Tensor


class Cases:
    """Every model with every LoRA in every size; the references are made once, here."""

    def __init__(self, folder: Path, *, num_ranks: int, num_models: int = 2) -> None:
        degrees = [(1, 1), (2, 1), (1, 2), (1, 3), (2, 2), (4, 1), (1, 4)]
        self.plans = [ParallelPlan(ulysses=u, ring=r) for u, r in degrees if u * r <= num_ranks]
        self.models = [write_model(folder / f"model{index}.safetensors", seed=index) for index in range(num_models)]
        self.loras = [PRISTINE, lora("one", seed=1, strength=0.8), lora("two", seed=2, strength=-1.1)]
        self.loras.append(lora("beside", seed=1, strength=0.4, side_branch=True))
        self.cases = [case for spec in self.models for each in self.loras for case in _cases(spec, each, folder)]

    def pick(self, chance: random.Random) -> tuple[Case, ParallelPlan]:
        """Any of them, under any plan."""
        return chance.choice(self.cases), chance.choice(self.plans)


def _cases(spec: ModelSpec, changes: PatchSet, folder: Path) -> list[Case]:
    weights = load_file(spec.path)
    for patch in changes.patches:
        up, down = patch.values[0], patch.values[1]
        weights[patch.key] = weights[patch.key] + patch.strength * 2.0 / LORA_RANK * (up @ down)
    merged = folder / f"merged_{changes.name}_{Path(spec.path).name}"
    save_file(weights, merged)
    judge, config = Oracle(str(merged)), FluxConfig.from_header(read_header(spec.path))
    made = []
    for workload in WORKLOADS:
        tensors = workload.tensors(config)
        made.append(Case(spec, changes, tensors, judge(tensors)))
    merged.unlink()
    return made
