"""Tiny models and LoRAs for them. Owns their sizes; the right answers are soak_cases.py's."""

from pathlib import Path

import torch

from host.tiny_hosted import WIDTH, spec_of, write_tiny
from parallel_runtime.checkpoint import ModelSpec
from parallel_runtime.weight_delta import WeightDelta, WeightDeltas

LORA_RANK = 4
LORA_WEIGHTS = {  # and how many rows each has, of WIDTH columns
    "blocks.0.self_attn.q.weight": WIDTH,
    "blocks.1.ffn.0.weight": 2 * WIDTH,
    "blocks.1.cross_attn.k.weight": WIDTH,
}


def write_model(path: Path, *, seed: int) -> ModelSpec:
    """A model of that seed's weights, of two blocks."""
    return spec_of(write_tiny(path, seed=seed, num_layers=2))


def lora(name: str, *, seed: int, strength: float, side_branch: bool = False) -> WeightDeltas:
    """A LoRA of three weights of such a model."""
    generator = torch.Generator().manual_seed(seed)
    deltas = []
    for key, rows in LORA_WEIGHTS.items():
        up = torch.randn(rows, LORA_RANK, generator=generator)
        down = torch.randn(LORA_RANK, WIDTH, generator=generator) * WIDTH**-0.5
        deltas.append(WeightDelta(key=key, kind="lora", strength=strength, values=(up, down, 2.0, None)))
    return WeightDeltas(name, tuple(deltas), side_branch=side_branch)
