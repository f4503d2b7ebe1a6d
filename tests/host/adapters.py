"""LoRA and its relatives as trainers write them: random tensors, so large that a picture changes by percents."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]


def noise(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * scale


def lora(rows: int, columns: int) -> Tensors:
    return {"lora_up.weight": noise(rows, 4, scale=0.3), "lora_down.weight": noise(4, columns, scale=columns**-0.5)}


def blocks(rows: int) -> torch.Tensor:
    size = next(size for size in (64, 24) if rows % size == 0)
    return noise(rows // size, size, size, scale=0.03)


# The tensors of one module by kind, under the names trainers write.
KINDS: dict[str, Callable[[int, int], Tensors]] = {
    "lora_alpha": lambda rows, columns: lora(rows, columns) | {"alpha": torch.tensor(2.0)},
    "dora_rows": lambda rows, columns: lora(rows, columns) | {"dora_scale": noise(rows, 1).abs() + 0.5},
    "dora_columns": lambda rows, columns: lora(rows, columns) | {"dora_scale": noise(1, columns).abs() + 0.5},
    "loha": lambda rows, columns: {
        "hada_w1_a": noise(rows, 4, scale=0.3),
        "hada_w1_b": noise(4, columns, scale=0.2),
        "hada_w2_a": noise(rows, 4, scale=0.3),
        "hada_w2_b": noise(4, columns, scale=0.2),
        "alpha": torch.tensor(4.0),
    },
    "lokr": lambda rows, columns: {"lokr_w1": noise(8, 8, scale=0.2), "lokr_w2": noise(rows // 8, columns // 8) * 0.1},
    "lokr_factors": lambda rows, columns: {
        "lokr_w1": noise(8, 8, scale=0.2),
        "lokr_w2_a": noise(rows // 8, 4, scale=0.2),
        "lokr_w2_b": noise(4, columns // 8, scale=0.2),
        "alpha": torch.tensor(2.0),
    },
    "glora": lambda rows, columns: {
        "a1.weight": noise(columns, 4, scale=0.05),
        "a2.weight": noise(4, columns, scale=0.05),
        "b1.weight": noise(rows, 4, scale=0.1),
        "b2.weight": noise(4, columns, scale=0.1),
    },
    "oft": lambda rows, columns: {"oft_blocks": blocks(rows)},
    "diff": lambda rows, columns: {"diff": noise(rows, columns, scale=0.03), "diff_b": noise(rows, scale=0.1)},
    "set": lambda rows, columns: {"set_weight": noise(rows, columns, scale=columns**-0.5)},
    "lora_core": lambda rows, columns: lora(rows, columns) | {"lora_mid.weight": noise(4, 4, 1, 1, scale=0.5)},
    "loha_core": lambda rows, columns: {
        "hada_t1": noise(4, 4, 1, 1, scale=0.4),
        "hada_w1_a": noise(4, rows, scale=0.4),
        "hada_w1_b": noise(4, columns, scale=0.4),
        "hada_t2": noise(4, 4, 1, 1, scale=0.4),
        "hada_w2_a": noise(4, rows, scale=0.4),
        "hada_w2_b": noise(4, columns, scale=0.4),
    },
}


def write_adapter(path: Path, kind: str, modules: Mapping[str, tuple[int, int]]) -> Path:
    """Writes a file of one kind for modules by name, each (rows, columns) of its weight."""
    tensors = {
        f"diffusion_model.{module}.{name}": value.contiguous()
        for module, size in modules.items()
        for name, value in KINDS[kind](*size).items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path)
    return path
