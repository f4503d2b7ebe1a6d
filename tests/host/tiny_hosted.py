"""A tiny Wan for tests whose ranks compute: its file, its calls as ComfyUI's sampler makes them, and one process.

12 heads of 12 in 4 blocks, up to four stages: ulysses of 2, 3, 4 and 6 divides the heads, of 5, 7 and 8 does not.
ComfyUI reads all sizes from the file's metadata, so any rank loads it, forked or not. A call sees 48 tokens unless told
otherwise, and a text by cross-attention. This process never imports ComfyUI.

Letters: `B` batch, `N` numbers of an image's latent.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from families.comfy_classes import Shapes, shapes_of
from families.files import ModelFile
from families.wan import wan_file
from host.fetch import comfyui_path
from host.layouts import Row
from host.tiny_models import write_layout
from parallel_runtime.checkpoint import ComfyUI, ModelSpec
from parallel_runtime.model_call import ModelCall
from parallel_runtime.models.hosted.calls import travelling
from parallel_runtime.planner.comfyui_process import ComfyUIProcess

HEADS, HEAD_DIM, BLOCKS, TEXT_DIM, CHANNELS = 12, 12, 4, 48, 16
WIDTH = HEADS * HEAD_DIM
SIZE = (2, 8, 12)  # frames, height and width of a latent; a token is 2 x 2 of them
CLASS = "WanModel"
SIZES = {"num_heads": HEADS, "dim": WIDTH, "ffn_dim": 2 * WIDTH, "num_layers": BLOCKS}


@functools.cache
def _rows(sizes: str) -> tuple[ModelFile, list[Row]]:
    """The file and its tensors, whose names and shapes ComfyUI's class says, asked once."""
    told = json.loads(sizes)
    file = wan_file("hosted", "t2v", heads=told["num_heads"], seed=0, **told)
    shapes: dict[str, Shapes] = shapes_of({file.name: (file.class_path, file.arguments)})
    return file, file.rows(shapes[file.name])


def write_tiny(path: Path, *, seed: int = 41, dtype: torch.dtype = torch.float32, **sizes: int) -> Path:
    """Write the model, 4.5 MB in fp32; `sizes` are arguments of ComfyUI's class other than `SIZES`."""
    file, rows = _rows(json.dumps(SIZES | sizes))
    return write_layout(path, rows, seed=seed, dtype=dtype, metadata=file.metadata)


def spec_of(path: Path | str, dtype: str = "float32", **more: Any) -> ModelSpec:
    """The identity of such a file, which ComfyUI's own module computes."""
    return ModelSpec.of(path, dtype, comfyui=ComfyUI(str(comfyui_path())), **more)


def call(
    step: int = 0,
    *,
    text: int = 7,
    batch: int = 1,
    size: tuple[int, int, int] = SIZE,
    seed: int = 0,
    options: Mapping[str, object] | None = None,
) -> ModelCall:
    """A call of the transformer in step number `step`, of a latent of `size`; a result of (B, N) fp32."""
    numbers = torch.Generator().manual_seed(1000 * seed + 100 * text + batch)
    x = torch.randn(batch, CHANNELS, *size, generator=numbers)
    context = torch.randn(batch, text, TEXT_DIM, generator=numbers)
    x = x + 0.4 * step * torch.randn(x.shape, generator=numbers)
    given = [x, torch.full((batch,), 900.0 - 200 * step), context]
    tensors, told = travelling(CLASS, given, {"transformer_options": {}}, batched=given)
    shape = (batch, x[0].numel())
    return ModelCall(tensors=tensors, out_shape=shape, out_dtype=torch.float32, options={**told, **(options or {})})


def with_options(made: ModelCall, **options: object) -> ModelCall:
    """The same call with more options."""
    return replace(made, options={**made.options, **options})


class OneProcess:
    """ComfyUI's bare module in a process of its own, which makes random calls and computes them."""

    def __init__(self, spec: ModelSpec) -> None:
        comfyui = ComfyUI(str(comfyui_path()), ("--use-pytorch-cross-attention",))
        self._process = ComfyUIProcess(comfyui, "cpu")
        self._process.ask("open", path=spec.path, dtype=spec.dtype, split=True, stages=BLOCKS)

    def __enter__(self) -> OneProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.close()

    def calls(
        self, texts: Sequence[int], *, width: int = 96, height: int = 64, frames: int = 5, batch: int = 1, seed: int = 0
    ) -> tuple[list[ModelCall], list[torch.Tensor]]:
        """A call for each text of so many tokens, and the result (B, N) of each."""
        file = str(self._process.folder / "calls.safetensors")
        size = {"width": width, "height": height, "frames": frames, "batch": batch, "seed": seed}
        size["text_tokens"] = max(texts)
        made = self._process.ask("calls", size=size, texts=list(texts), steps=1, file=file)
        tensors, found = load_file(file), []
        for number, options in enumerate(made["options"][0]):
            given = {f"t{n}": tensors[f"0.{number}.t{n}"] for n in range(options["tensors"])}
            shape = tuple(tensors[f"0.{number}.out"].shape)
            found.append(ModelCall(tensors=given, out_shape=shape, out_dtype=torch.float32, options=options))
        return found, [tensors[f"0.{number}.out"] for number in range(len(found))]

    def outputs(self, dtype: str) -> list[torch.Tensor]:
        """What the same calls give in another dtype."""
        file = str(self._process.folder / "outputs.safetensors")
        self._process.ask("outputs", dtype=dtype, file=file)
        tensors = load_file(file)
        return [tensors[f"0.{number}.out"] for number in range(len(tensors))]
