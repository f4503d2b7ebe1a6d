"""A small model of random weights for the doctor: a Wan, all of whose sizes ComfyUI reads from the file.

Owns the names and shapes of its tensors. Written without ComfyUI; its own module reads it like any other file.
"""

import json
import math
import os
from collections.abc import Iterator

import torch
from safetensors.torch import save_file

HEADS, HEAD_DIM, BLOCKS = 12, 12, 2
WIDTH, TEXT, TIMES, CHANNELS, PATCH = HEADS * HEAD_DIM, 32, 32, 16, 4
TOLD = {"num_heads": HEADS, "freq_dim": TIMES, "text_dim": TEXT}  # what the shapes do not say
SEED = 7


def write_sample(path: str | os.PathLike[str]) -> None:
    """Write the file, 3 MB in fp32."""
    generator = torch.Generator().manual_seed(SEED)
    tensors = {}
    for name, shape in _shapes():
        values = torch.randn(shape, generator=generator)
        if name.endswith(".bias"):
            values *= 0.02
        elif name.endswith(".weight") and len(shape) == 1:  # of a norm
            values = 1 + 0.1 * values
        elif name.endswith(".weight"):
            values /= math.sqrt(math.prod(shape[1:]))
        tensors[name] = values
    save_file(tensors, path, {"config": json.dumps({"transformer": TOLD})})


def _shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Each tensor's name and shape."""
    yield "patch_embedding.weight", (WIDTH, CHANNELS, 1, 2, 2)
    yield "patch_embedding.bias", (WIDTH,)
    matrices = {
        "text_embedding.0": (WIDTH, TEXT),
        "text_embedding.2": (WIDTH, WIDTH),
        "time_embedding.0": (WIDTH, TIMES),
        "time_embedding.2": (WIDTH, WIDTH),
        "time_projection.1": (6 * WIDTH, WIDTH),
        "head.head": (PATCH * CHANNELS, WIDTH),
    }
    yield "head.modulation", (1, 2, WIDTH)
    for number in range(BLOCKS):
        block = f"blocks.{number}"
        yield f"{block}.modulation", (1, 6, WIDTH)
        yield f"{block}.norm3.weight", (WIDTH,)
        yield f"{block}.norm3.bias", (WIDTH,)
        for attention in ("self_attn", "cross_attn"):
            matrices |= {f"{block}.{attention}.{each}": (WIDTH, WIDTH) for each in "qkvo"}
            yield f"{block}.{attention}.norm_q.weight", (WIDTH,)
            yield f"{block}.{attention}.norm_k.weight", (WIDTH,)
        matrices |= {f"{block}.ffn.0": (2 * WIDTH, WIDTH), f"{block}.ffn.2": (WIDTH, 2 * WIDTH)}
    for name, shape in matrices.items():
        yield f"{name}.weight", shape
        yield f"{name}.bias", shape[:1]
