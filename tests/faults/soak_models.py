"""Tiny models and LoRAs for them. Owns their sizes; the right answers are soak_cases.py's, which needs diffusers."""

from pathlib import Path

import torch

from parallel_runtime.checkpoint import ModelSpec
from parallel_runtime.models.flux.sample import sample_config, write_sample
from parallel_runtime.weight_patch import WeightPatch, WeightPatchSet

LORA_RANK = 4
LORA_WEIGHTS = tuple(
    f"{name}.weight"
    for name in ("double_blocks.0.img_attn.qkv", "single_blocks.0.linear1", "double_blocks.1.txt_mlp.0")
)


def write_model(path: Path, *, seed: int) -> ModelSpec:
    """A model of that seed's weights, 128 wide."""
    write_sample(path, sample_config(heads=4, depth=2, depth_single=2), seed=seed)
    return ModelSpec.of(path)


def lora(name: str, *, seed: int, strength: float, side_branch: bool = False) -> WeightPatchSet:
    """A LoRA of three weights. The sizes are those of the model above: 128 wide."""
    generator = torch.Generator().manual_seed(seed)
    rows = {"qkv": 384, "linear1": 896, "txt_mlp": 512}
    patches = []
    for key in LORA_WEIGHTS:
        out = next(size for word, size in rows.items() if word in key)
        up = torch.randn(out, LORA_RANK, generator=generator) * 0.3
        down = torch.randn(LORA_RANK, 128, generator=generator) * 128**-0.5
        patches.append(WeightPatch(key=key, kind="lora", strength=strength, values=(up, down, 2.0, None)))
    return WeightPatchSet(name, tuple(patches), side_branch=side_branch)
