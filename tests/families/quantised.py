"""Files of Wan in every quantised format, and graphs of them: what is compared is in tools/formats.py and the tests."""

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from host.adapters import write_adapter
from host.client import Workflow
from host.quantised import MIXED, quantised

from .files import write_model_files
from .hosted import small
from .wan import wan_file

WAN = wan_file("quantised", "t2v", heads=5, seed=28, dim=320, ffn_dim=640, num_layers=2)
LORA = "quantised_wan.safetensors"
PLANS: dict[str, dict[str, Any]] = {
    "ulysses 2": {"ulysses": 2},
    "ring 2": {"ring": 2},
    "ulysses 3": {"ulysses": 3, "devices": "cpu:3"},
    "sharded": {"ulysses": 2, "weights": "sharded"},
}
ROUNDED = 1e-2  # the least bound where layers round what they are given
ROUND_INPUTS = ("int8", "w4a4", MIXED)


def rounds_inputs(kind: str) -> bool:
    """Whether layers round what they are given, on a CPU too."""
    return kind.startswith(ROUND_INPUTS)


def file_of(kind: str) -> str:
    return f"wan_{kind.replace(' ', '_').replace(',', '')}.safetensors"


def write_files(models: Path, kinds: Iterable[str]) -> list[Path]:
    """A file of each kind, the same in bf16, and a LoRA."""
    folder = models / "diffusion_models"
    with tempfile.TemporaryDirectory() as made:
        (source,) = write_model_files(Path(made), [WAN])
        with safe_open(source, framework="pt") as file:
            whole = {name: file.get_tensor(name) for name in file.keys()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: each.to(torch.bfloat16) for name, each in whole.items()}, folder / WAN.name, metadata=WAN.metadata)
    for kind in kinds:
        tensors, said = quantised(whole, kind)
        save_file(tensors, folder / file_of(kind), metadata=WAN.metadata | said)
    (models / "loras").mkdir(exist_ok=True)
    sizes = {"blocks.0.self_attn.q": (320, 320), "blocks.1.ffn.0": (640, 320), "text_embedding.0": (320, 48)}
    lora = write_adapter(models / "loras" / LORA, "lora_alpha", sizes)
    return [lora, folder / WAN.name, *(folder / file_of(kind) for kind in kinds)]


def graph_of(file: str, *, seed: int = 7) -> Workflow:
    graph = small(steps=2, seed=seed)
    graph["model"]["inputs"]["unet_name"] = file
    return graph
