"""LoRAs for the models that the runtime's tests write."""

import torch

from parallel_runtime.checkpoint import ModelSpec, read_header
from parallel_runtime.weight_delta import WeightDelta, WeightDeltas


def lora(spec: ModelSpec, *keys: str, side_branch: bool) -> WeightDeltas:
    """A LoRA of rank 4 of these weights."""
    generator = torch.Generator().manual_seed(3)
    deltas = []
    for key in keys:
        rows, columns = read_header(spec.path).tensors[key].shape
        up, down = torch.randn(rows, 4, generator=generator), torch.randn(4, columns, generator=generator)
        deltas.append(WeightDelta(key=key, kind="lora", strength=0.3, values=(up, down * columns**-0.5, 4.0, None)))
    return WeightDeltas(f"lora {keys} {side_branch}", tuple(deltas), side_branch=side_branch)
