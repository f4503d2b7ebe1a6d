"""Writes tiny random-weight models in ComfyUI's own file formats, and large ones cheaply.

Owns: values (deterministic by seed and tensor name), types, the files' names and folders. Does not own: which tensors
a model has (layouts.py, encoder_layouts.py). Files are written tensor by tensor, so memory stays at one tensor.
"""

import functools
import json
import math
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from . import encoder_layouts, layouts
from .layouts import FluxShape, Row

COMMON_NUMBERS = 1_999_993  # a prime, so that no two rows of a matrix are alike
SAFETENSORS_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3"}


def parts_of(row: Row, *, seed: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """The values of one tensor by its name and the seed alone, flat, a part after the other; small ones in one."""
    number, total = zlib.crc32(f"{seed}:{row.name}".encode()), math.prod(row.shape)
    noise = common_noise() if row.std and total > COMMON_NUMBERS else None
    if noise is None:
        generator = torch.Generator().manual_seed(number)
        values = row.std * torch.randn(row.shape, generator=generator).view(-1) if row.std else torch.zeros(total)
        yield (values + row.mean).to(dtype)
        return
    start = number % len(noise)
    common = (torch.cat((noise[start:], noise[:start])) * row.std + row.mean).to(dtype)
    for first in range(0, total, len(common)):
        yield common[: total - first]


@functools.cache
def common_noise() -> torch.Tensor:
    """What large tensors are made of, again and again: a gigabyte of random numbers takes half a minute to draw."""
    return torch.randn(COMMON_NUMBERS, generator=torch.Generator().manual_seed(0))


def write_layout(
    path: Path,
    rows: Iterable[Row],
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    prefix: str = "",
    metadata: dict[str, str] | None = None,
    values_of: Callable[[Row], bytes] | None = None,
) -> Path:
    """Writes a safetensors file; `prefix` goes before every name; `values_of` replaces the random values' bytes."""
    rows = list(rows)
    header: dict[str, dict[str, object]] = {"__metadata__": {**metadata}} if metadata else {}
    end = 0
    for row in rows:
        start, end = end, end + math.prod(row.shape) * dtype.itemsize
        entry = {"dtype": SAFETENSORS_NAMES[dtype], "shape": list(row.shape), "data_offsets": [start, end]}
        header[prefix + row.name] = entry
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the format aligns the data to 8 bytes
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for row in rows:
            parts = [values_of(row)] if values_of else map(to_bytes, parts_of(row, seed=seed, dtype=dtype))
            file.writelines(parts)
    return path


def to_bytes(tensor: torch.Tensor) -> bytes:
    """A tensor's bytes in row order, whatever its type."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def write_flux(path: Path, *, seed: int = 0, **sizes: int) -> Path:
    """Writes a Flux file; `sizes` are FluxShape's fields (hidden, depth, single, ctx, vec, in_channels, guidance)."""
    return write_layout(path, layouts.flux(FluxShape(**sizes)), seed=seed)


@dataclass(frozen=True)
class TinyModels:
    """A base directory whose `models` folder holds the tiny files, and the names a workflow gives them."""

    base: Path
    shape: FluxShape
    dev: str = "tiny_flux_dev.safetensors"
    dev_saved: str = "tiny_flux_dev_saved_by_comfyui.safetensors"
    schnell: str = "tiny_flux_schnell.safetensors"
    fill: str = "tiny_flux_fill.safetensors"
    checkpoint: str = "tiny_flux_all_in_one.safetensors"
    vae: str = "tiny_taesd_flux.safetensors"
    clip_l: str = "tiny_clip_l.safetensors"
    t5: str = "tiny_t5.safetensors"
    lora_fused: str = "tiny_lora_fused.safetensors"
    lora_diffusers: str = "tiny_lora_diffusers.safetensors"
    controlnet_xlabs: str = "tiny_controlnet_xlabs.safetensors"
    controlnet_union: str = "tiny_controlnet_union.safetensors"

    @property
    def models(self) -> Path:
        return self.base / "models"

    def diffusion_model(self, name: str) -> Path:
        return self.models / "diffusion_models" / name


def write_tiny_models(base: Path, *, dtype: torch.dtype = torch.float32, **sizes: int) -> TinyModels:
    """Writes every tiny model into `base`/models (190 MB at the default sizes); `sizes` are FluxShape's fields."""
    shape = FluxShape(**sizes)
    tiny = TinyModels(base=base, shape=shape)
    schnell, fill = replace(shape, guidance=False), replace(shape, in_channels=96)
    control = replace(shape, depth=1, single=1)
    save = tiny.models
    write_layout(tiny.diffusion_model(tiny.dev), layouts.flux(shape), seed=0, dtype=dtype)
    saved = layouts.flux(shape, norm_suffix="weight")
    write_layout(tiny.diffusion_model(tiny.dev_saved), saved, seed=8, dtype=dtype)
    write_layout(tiny.diffusion_model(tiny.schnell), layouts.flux(schnell), seed=1, dtype=dtype)
    write_layout(tiny.diffusion_model(tiny.fill), layouts.flux(fill), seed=2, dtype=dtype)
    all_in_one = save / "checkpoints" / tiny.checkpoint
    write_layout(all_in_one, layouts.flux(shape), seed=0, dtype=dtype, prefix="model.diffusion_model.")
    write_layout(save / "vae" / tiny.vae, encoder_layouts.taesd(), seed=3)
    half = torch.float16  # as the published text encoders
    write_layout(save / "text_encoders" / tiny.clip_l, encoder_layouts.clip_l(shape.vec), seed=4, dtype=half)
    write_layout(save / "text_encoders" / tiny.t5, encoder_layouts.t5(shape.ctx), seed=5, dtype=half)
    write_layout(save / "loras" / tiny.lora_fused, layouts.lora_fused(shape), seed=6, dtype=dtype)
    write_layout(save / "loras" / tiny.lora_diffusers, layouts.lora_diffusers(shape), seed=7, dtype=dtype)
    xlabs, union = layouts.controlnet_xlabs(replace(control, single=0)), layouts.controlnet_union(control)
    write_layout(save / "controlnet" / tiny.controlnet_xlabs, xlabs, seed=9, dtype=dtype)
    write_layout(save / "controlnet" / tiny.controlnet_union, union, seed=10, dtype=dtype)
    return tiny
