"""A small Flux.1 of random weights, for checks that need a model and have none.

The gates of its blocks are O(1), so that an error in attention reaches the output instead of vanishing in it.
"""

import os

import torch
from safetensors.torch import save_file

from .config import FluxConfig


def sample_config(*, heads: int = 24, head_dim: int = 32, depth: int = 1, depth_single: int = 1) -> FluxConfig:
    """Sizes of a Flux.1 that any plan of up to eight ranks can split: 24 heads, of 32 so that it stays small."""
    hidden = heads * head_dim
    return FluxConfig(
        hidden_size=hidden,
        num_heads=heads,
        head_dim=head_dim,
        depth=depth,
        depth_single=depth_single,
        in_channels=64,
        out_channels=64,
        context_dim=64,
        vec_dim=32,
        mlp_hidden=4 * hidden,
        guidance=True,
        prefix="",
    )


def write_sample(path: str | os.PathLike[str], config: FluxConfig, *, seed: int = 0) -> None:
    """Write a model of that config to `path`, in fp32, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    save_file({name: _values(name, shape, generator) for name, shape in config.expected_shapes().items()}, path)


def _values(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    values = torch.randn(shape, generator=generator)
    if "norm.query_norm" in name or "norm.key_norm" in name:
        return 1 + 0.1 * values
    modulation = ".lin." in name or "adaLN" in name
    if name.endswith(".bias"):
        return values * (0.6 if modulation else 0.02)
    return values * ((0.4 if modulation else 1.0) / shape[-1] ** 0.5)
