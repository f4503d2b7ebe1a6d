"""Writes the families' tiny files: names and shapes from ComfyUI's own classes, random values by seed and tensor name.

Gates, norms and modulations are of the order of 1, and queries and keys long enough that attention is far from
uniform: with small gates an error of attention would vanish in the output.
"""

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from host.layouts import Row
from host.tiny_models import write_layout

from .comfy_classes import Shapes, shapes_of


@dataclass(frozen=True)
class Rule:
    """Tensors whose name matches: `std` and `mean` of their values; `gain` instead of `std` divides by the fan-in."""

    pattern: str
    std: float | None = None
    mean: float = 0.0
    gain: float = 1.0


# The first rule that matches counts. Names of all families at once, since they were chosen alike.
RULES = (
    Rule(r"(norm_?(added_)?[qk](_img)?|[qk]_norm|(query|key)_norm)\.(weight|scale)$", std=0.1, mean=1.5),
    Rule(r"(^|\.)(\w*_)?(modulation|scale_shift_table\w*)$", std=0.3, mean=1.0),  # bare parameters, no layer
    Rule(r"(mod(ulation)?(\.\w+)?|adaln\w*|time_projection)\.\d\.weight$|adaln_\w+\.linear\.weight$", gain=0.5),
    Rule(r"(mod(ulation)?(\.\w+)?|adaln\w*|time_projection)\.\d\.bias$|adaln_\w+\.linear\.bias$", std=0.25, mean=0.5),
    Rule(r"\.bias$", std=0.02),
)
NORM, LAYER = Rule("", std=0.1, mean=1.0), Rule("")


@dataclass(frozen=True, kw_only=True)
class ModelFile:
    """One file of `diffusion_models`.

    `class_path` is ComfyUI's class, `arguments` those of its constructor. `told` are the arguments that the detection
    cannot read from shapes: they go into the file's metadata, where ComfyUI looks for them; `told_by_test_host`: where
    the test host alone looks for them (host/told_sizes.py), as ComfyUI fixes them at the published sizes. `rules` come
    before RULES; `prefix` before the names. `layout` says all of that by itself. `only_when_full`: too large for
    `make test`, as ComfyUI fixes its widths.
    """

    name: str
    class_path: str
    arguments: dict[str, Any] = field(default_factory=dict)
    layout: tuple[Row, ...] | None = None
    told: tuple[str, ...] = ()
    told_by_test_host: bool = False
    prefix: str = ""
    rules: tuple[Rule, ...] = ()
    seed: int = 0
    dtype: torch.dtype = torch.float32  # of the file; what is compared is computed in fp32
    only_when_full: bool = False

    @property
    def metadata(self) -> dict[str, str]:
        """What ComfyUI's detection takes from a file beside its shapes."""
        told = {name: self.arguments[name] for name in self.told}
        return {"config": json.dumps({"transformer": told})} if told else {}

    def rows(self, shapes: Shapes) -> list[Row]:
        rules = (*self.rules, *RULES)
        return [row(f"{self.prefix}{name}", tuple(shape), rules) for name, shape in shapes.items()]


def tiny(name: str, path: str, seed: int, sizes: dict[str, Any], **more: Any) -> ModelFile:
    """A file of a class below `comfy.ldm`, built with these arguments."""
    return ModelFile(
        name=f"tiny_{name}.safetensors", class_path=f"comfy.ldm.{path}", arguments=sizes, seed=seed, **more
    )


def large(name: str, path: str, seed: int, sizes: dict[str, Any]) -> ModelFile:
    """The same in bf16, of widths that ComfyUI fixes."""
    return tiny(name, path, seed, sizes, dtype=torch.bfloat16, only_when_full=True)


def row(name: str, shape: tuple[int, ...], rules: Iterable[Rule]) -> Row:
    """One tensor by the first rule that matches; without one, a norm's weight or a layer that keeps the variance."""
    otherwise = NORM if len(shape) == 1 else LAYER
    rule = next((each for each in rules if re.search(each.pattern, name)), otherwise)
    fan_in = math.prod(shape[1:]) or 1
    return Row(name, shape, rule.gain / math.sqrt(fan_in) if rule.std is None else rule.std, rule.mean)


def write_model_files(folder: Path, files: Iterable[ModelFile]) -> list[Path]:
    """Writes `files` into `folder`; one child process of ComfyUI names the tensors of those without a layout.

    A file of a class that this ComfyUI does not have is not written: no loader of its lists it.
    """
    files = list(files)
    unknown = {file.name: (file.class_path, file.arguments) for file in files if file.layout is None}
    shapes = shapes_of(unknown) if unknown else {}
    return [
        write_layout(
            folder / file.name,
            file.layout or file.rows(shapes[file.name]),
            seed=file.seed,
            dtype=file.dtype,
            metadata=file.metadata,
        )
        for file in files
        if file.layout or file.name in shapes
    ]
