"""Writes the tiny files that templates load: models, checkpoints, LoRAs of them, ControlNets.

Owns: the files of a `models` folder, each written once. Does not own: which models there are (models.py), how a model's
tensors are made (tests/families/files.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from families import sd3
from families.files import write_model_files

from .models import Tiny

LORA_LAYERS, LORA_RANK = 6, 4
IN_CHECKPOINT = "model.diffusion_model."


@dataclass
class Files:
    """The files of a `models` folder, each written when it is first asked for."""

    folder: Path

    def need(self, wanted: Sequence[tuple[str, Tiny]]) -> None:
        """Has files of these kinds: `diffusion_models`, `checkpoints`, `loras`, `controlnet`."""
        models = [tiny for _, tiny in wanted if not self.path("diffusion_models", tiny).exists()]
        write_model_files(self.folder / "diffusion_models", {tiny.name: tiny.file for tiny in models}.values())
        for kind, tiny in wanted:
            path, source = self.path(kind, tiny), self.path("diffusion_models", tiny)
            if source.exists() and not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                WRITERS[kind](path, source, tiny)

    def path(self, kind: str, tiny: Tiny) -> Path:
        """Where a file lies."""
        return self.folder / kind / tiny.name


def write_checkpoint(path: Path, model: Path, tiny: Tiny) -> None:
    """A checkpoint that holds a model's file, and of a VAE what ComfyUI's loader asks for."""
    with safe_open(model, framework="pt") as file:
        metadata = file.metadata()
    weights = {f"{IN_CHECKPOINT}{name}": each for name, each in load_file(model).items()}
    numbers = torch.Generator().manual_seed(7)
    beside = {name: 0.05 * torch.randn(shape, generator=numbers) for name, shape in tiny.beside.items()}
    beside["first_stage_model.encoder.conv_in.bias"] = torch.zeros(4)
    save_file(weights | beside, path, metadata=metadata)


def write_lora(path: Path, model: Path, _: Tiny) -> None:
    """A LoRA of some layers of a model's file, about a tenth of what they are."""
    with safe_open(model, framework="pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}
    layers = [name for name, shape in shapes.items() if re.search(r"\.\d+\..*\.weight$", name) and len(shape) == 2]
    chosen = layers[:: max(1, len(layers) // LORA_LAYERS)][:LORA_LAYERS]
    numbers, weights = torch.Generator().manual_seed(5), {}
    for name in chosen:
        rows, columns = shapes[name]
        layer = f"diffusion_model.{name.removesuffix('.weight')}"
        down = torch.randn(LORA_RANK, columns, generator=numbers) / columns**0.5
        weights |= {f"{layer}.lora_A.weight": down}
        weights |= {f"{layer}.lora_B.weight": 0.1 * torch.randn(rows, LORA_RANK, generator=numbers)}
    save_file(weights, path)


def write_controlnet(path: Path, _: Path, tiny: Tiny) -> None:
    """A ControlNet that copies an embedder of SD3.5, as Stability's do."""
    write_model_files(path.parent, [sd3.controlnet_of_sd35(tiny.name, double=False)])


WRITERS = {"checkpoints": write_checkpoint, "loras": write_lora, "controlnet": write_controlnet}
