"""What stands for each file that templates name: a tiny model of the same class, encoders and VAEs without weights.

Owns: which tiny model stands for a published file, by its name, and what its encoders give. Does not own: how tiny
files are written (tests/families/files.py), what becomes of the graph (swap.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from families.files import ModelFile, write_model_files
from families.small import Z_IMAGE
from families.variants import FILES
from parallel_runtime.models.specs import SPECS

LORA_LAYERS, LORA_RANK = 6, 4
IN_CHECKPOINT = "model.diffusion_model."


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """A tiny model: its file, what its text encoder gives (StandInText's sizes), what its vision encoder gives."""

    file: ModelFile
    text: Mapping[str, Any]
    vision: tuple[int, int, int] = (13, 1280, 1024)  # tokens, their width, that of what is pooled
    hearing: tuple[int, int, int] = (1, 16, 768)  # layers, frames, width

    @property
    def name(self) -> str:
        """Its file's name."""
        return self.file.name

    @property
    def shares_tokens(self) -> bool:
        """Whether ranks share its tokens; else they share the rows of a batch."""
        return self.file.class_path in SPECS


def text(width: int, tokens: int = 11, **more: object) -> dict[str, Any]:
    """A text encoder's sizes."""
    return {"width": width, "tokens": tokens, **more}


TINY: dict[str, Tiny] = {
    "flux.1": Tiny(file=FILES["tiny_flux_1.safetensors"], text=text(64, pooled=32)),
    "z-image": Tiny(file=Z_IMAGE, text=text(48)),
    "wan t2v": Tiny(file=FILES["tiny_wan_t2v.safetensors"], text=text(48)),
}
# The first pattern that a file's name holds counts.
MODELS: Sequence[tuple[str, str]] = (
    (r"^flux1-(dev|krea)|^flux1-dev-kontext", "flux.1"),
    (r"^z_image", "z-image"),
    (r"^wan2\.1_t2v", "wan t2v"),
)
# Channels, pixels a side of a latent pixel, pictures a frame (0: pictures stay pictures).
VAES: Sequence[tuple[str, tuple[int, int, int]]] = (
    (r"^ae\.|^flux1-|full_encoder_small_decoder", (16, 8, 0)),
    (r"^wan_2\.1|^Wan2_1|^qwen_image", (16, 8, 4)),
)


def tiny_of(name: str) -> Tiny | None:
    """The tiny model that stands for a file; None where there is none."""
    return next((TINY[tiny] for pattern, tiny in MODELS if re.search(pattern, base(name))), None)


def vae_of(name: str) -> tuple[int, int, int] | None:
    """What a VAE's file, or a checkpoint with one, does to sizes; None where that is not known."""
    return next((sizes for pattern, sizes in VAES if re.search(pattern, base(name))), None)


def base(name: str) -> str:
    """A file's name without its folders, which a template may write either way."""
    return re.split(r"[\\/]", name)[-1]


@dataclass
class Files:
    """The files of a `models` folder, each written when it is first asked for."""

    folder: Path
    written: set[str] = field(default_factory=set)

    def need(self, wanted: Sequence[tuple[str, Tiny]]) -> None:
        """Has files of these kinds: `diffusion_models`, `checkpoints` or `loras`."""
        models = [tiny for _, tiny in wanted if not self.path("diffusion_models", tiny).exists()]
        write_model_files(self.folder / "diffusion_models", {tiny.name: tiny.file for tiny in models}.values())
        for kind, tiny in wanted:
            path, source = self.path(kind, tiny), self.path("diffusion_models", tiny)
            if source.exists() and not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                (write_checkpoint if kind == "checkpoints" else write_lora)(path, source)

    def path(self, kind: str, tiny: Tiny) -> Path:
        """Where a file lies."""
        return self.folder / kind / tiny.name


def write_checkpoint(path: Path, model: Path) -> None:
    """A checkpoint that holds a model's file, and of a VAE what ComfyUI's loader asks for."""
    with safe_open(model, framework="pt") as file:
        metadata = file.metadata()
    weights = {f"{IN_CHECKPOINT}{name}": each for name, each in load_file(model).items()}
    save_file(weights | {"first_stage_model.encoder.conv_in.bias": torch.zeros(4)}, path, metadata=metadata)


def write_lora(path: Path, model: Path) -> None:
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
