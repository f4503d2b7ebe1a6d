"""What one Flux.1 file holds: every size read from its shapes, every weight's presence and shape checked.

Owns the names of the weights and the refusals. Reads headers only.
"""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from ...checkpoint import CheckpointHeader, TensorEntry, shown

PREFIXES = ("", "model.diffusion_model.", "diffusion_model.")
TIME_WIDTH = 256  # width of the sinusoids that carry the timestep and the guidance
TIME_FACTOR = 1000.0  # by which both are multiplied before
WEIGHT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
SCALED_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)  # which a file may hold with a scale a matrix
MAX_BLOCKS = 1024  # Flux.1 has 57. What each needs is written out before it is looked for.
# What ComfyUI calls the scale of an fp8 matrix, today and before: `X.weight_scale` or `X.scale_weight` for `X.weight`.
SCALE_SUFFIXES = (".weight_scale", ".scale_weight")
FORMAT_MARK = ".comfy_quant"  # says the format of a layer, where the file's header does not say all of them
# How names begin that other models with such blocks have, and those models.
FOREIGN = {
    "double_stream_modulation_img.": "Flux.2",
    "distilled_guidance_layer.": "Chroma",
    "txt_in.individual_token_refiner.": "HunyuanVideo",
    "double_blocks.0.img_mlp.gate_proj.": "Ovis-Image",
}


@dataclass(frozen=True, kw_only=True)
class FluxConfig:
    """Sizes of one Flux.1 transformer, all read from the shapes in its file."""

    hidden_size: int
    num_heads: int
    head_dim: int
    depth: int
    depth_single: int
    in_channels: int
    out_channels: int
    context_dim: int
    vec_dim: int
    mlp_hidden: int
    guidance: bool
    prefix: str

    @classmethod
    def from_header(cls, header: CheckpointHeader) -> "FluxConfig":
        """Read the sizes. Raises `ValueError` when the file holds no Flux.1 transformer."""
        prefix = _find_prefix(header)
        shapes = _shapes(header, prefix)
        _refuse_other_models(header.path, shapes)
        _refuse_other_formats(header, prefix)
        hidden, in_channels = _matrix(header.path, shapes, "img_in.weight")
        (head_dim,) = _shape(header.path, shapes, "double_blocks.0.img_attn.norm.query_norm.weight", 1)
        config = cls(
            hidden_size=hidden,
            num_heads=hidden // max(head_dim, 1),
            head_dim=head_dim,
            depth=_count(shapes, "double_blocks"),
            depth_single=_count(shapes, "single_blocks"),
            in_channels=in_channels,
            out_channels=_matrix(header.path, shapes, "final_layer.linear.weight")[0],
            context_dim=_matrix(header.path, shapes, "txt_in.weight")[1],
            vec_dim=_matrix(header.path, shapes, "vector_in.in_layer.weight")[1],
            mlp_hidden=_matrix(header.path, shapes, "double_blocks.0.img_mlp.0.weight")[0],
            guidance="guidance_in.in_layer.weight" in shapes,
            prefix=prefix,
        )
        config.check(header.path, shapes)
        return config

    @cached_property
    def rope_axes(self) -> tuple[int, int, int]:
        """Rotary widths of the reference index, row and column: (16, 56, 56) for heads of 128."""
        first = self.head_dim // 8
        rest = (self.head_dim - first) // 2
        return first, rest, rest

    def expected_shapes(self) -> dict[str, tuple[int, ...]]:
        """Canonical name and shape of every weight this config needs."""
        hidden, mlp = self.hidden_size, self.mlp_hidden
        shapes: dict[str, tuple[int, ...]] = {}

        def linear(name: str, rows: int, columns: int) -> None:
            shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (rows, columns), (rows,)

        linear("img_in", hidden, self.in_channels)
        linear("txt_in", hidden, self.context_dim)
        embedders = {"time_in": TIME_WIDTH, "vector_in": self.vec_dim}
        if self.guidance:
            embedders["guidance_in"] = TIME_WIDTH
        for name, width in embedders.items():
            linear(f"{name}.in_layer", hidden, width)
            linear(f"{name}.out_layer", hidden, hidden)
        for block in range(self.depth):
            for stream in ("img", "txt"):
                prefix = f"double_blocks.{block}.{stream}_"
                linear(f"{prefix}mod.lin", 6 * hidden, hidden)
                linear(f"{prefix}attn.qkv", 3 * hidden, hidden)
                linear(f"{prefix}attn.proj", hidden, hidden)
                linear(f"{prefix}mlp.0", mlp, hidden)
                linear(f"{prefix}mlp.2", hidden, mlp)
                shapes[f"{prefix}attn.norm.query_norm.weight"] = (self.head_dim,)
                shapes[f"{prefix}attn.norm.key_norm.weight"] = (self.head_dim,)
        for block in range(self.depth_single):
            prefix = f"single_blocks.{block}."
            linear(f"{prefix}modulation.lin", 3 * hidden, hidden)
            linear(f"{prefix}linear1", 3 * hidden + mlp, hidden)
            linear(f"{prefix}linear2", hidden, hidden + mlp)
            shapes[f"{prefix}norm.query_norm.weight"] = (self.head_dim,)
            shapes[f"{prefix}norm.key_norm.weight"] = (self.head_dim,)
        linear("final_layer.linear", self.out_channels, hidden)
        linear("final_layer.adaLN_modulation.1", 2 * hidden, hidden)
        return shapes

    def check(self, path: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Hold every weight's shape against what the config needs; raises `ValueError` at the first that differs."""
        whole_heads = self.num_heads > 0 and self.num_heads * self.head_dim == self.hidden_size
        if not whole_heads or any(width % 2 for width in self.rope_axes):
            raise ValueError(
                f"{path}: hidden size {self.hidden_size} with heads of {self.head_dim} is no Flux.1; use a Flux.1 file"
            )
        blocks = self.depth + self.depth_single
        if blocks > MAX_BLOCKS:
            raise ValueError(f"{path} names {blocks} blocks, at most {MAX_BLOCKS} are read; use a Flux.1 file")
        for name, wanted in self.expected_shapes().items():
            found = shapes.get(name)
            if found != wanted:
                has = "is missing" if found is None else f"has shape {list(found)}"
                raise ValueError(f"{path}: {name} {has}, Flux.1 needs {list(wanted)}; use a complete Flux.1 file")


def canonical_name(name: str) -> str:
    """ComfyUI's name of a weight: BFL calls the scales of its RMS norms `.scale`, ComfyUI `.weight`."""
    return re.sub(r"(query_norm|key_norm)\.scale$", r"\1.weight", name)


def scale_names(name: str) -> tuple[str, ...]:
    """The names under which a file may hold the scale of the weight `name`."""
    return tuple(name.removesuffix(".weight") + suffix for suffix in SCALE_SUFFIXES)


def file_names(header: CheckpointHeader, prefix: str, wanted: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Where each wanted weight stands in the file: canonical name to the file's name."""
    present = {canonical_name(name[len(prefix) :]): name for name in header.tensors if name.startswith(prefix)}
    return {name: present[name] for name in wanted}


def file_scales(header: CheckpointHeader, names: Mapping[str, str]) -> dict[str, str]:
    """Where the scale of each fp8 weight stands: canonical name to the file's name of the scale."""
    found = {
        canonical: [scale for scale in scale_names(name) if scale in header.tensors]
        for canonical, name in names.items()
        if header.tensors[name].dtype in SCALED_DTYPES
    }
    return {canonical: scales[0] for canonical, scales in found.items() if scales}


def is_flux(header: CheckpointHeader) -> bool:
    """Whether a file is a Flux.1 by its names, whatever else is wrong with it."""
    for prefix in PREFIXES:
        if f"{prefix}double_blocks.0.img_attn.qkv.weight" in header.tensors:
            names = [name.removeprefix(prefix) for name in header.tensors if name.startswith(prefix)]
            return _foreign(names) is None and any(name.startswith("vector_in.") for name in names)
    return False


def is_in_a_format_of_comfyui(header: CheckpointHeader) -> bool:
    """Whether a Flux.1 says formats of its layers, and some of them are finer or smaller than fp8 with one scale."""
    own = own_tensors(header)
    told = "_quantization_metadata" in header.metadata or any(name.endswith(FORMAT_MARK) for name in own)
    return told and any(_unread(name, entry) for name, entry in own.items())


def own_tensors(header: CheckpointHeader) -> dict[str, TensorEntry]:
    """What a Flux.1 file has of the transformer, by the file's names; a checkpoint has text encoders and a VAE too."""
    prefix = _find_prefix(header)
    return {name: entry for name, entry in header.tensors.items() if name.startswith(prefix)}


def _unread(name: str, entry: TensorEntry) -> bool:
    if name.endswith(SCALE_SUFFIXES):
        return math.prod(entry.shape) != 1
    return name.endswith((".weight", ".bias")) and entry.dtype not in WEIGHT_DTYPES


def _foreign(names: Collection[str]) -> str | None:
    """Which other model with such blocks these names belong to."""
    return next((model for start, model in FOREIGN.items() if any(name.startswith(start) for name in names)), None)


def _find_prefix(header: CheckpointHeader) -> str:
    for prefix in PREFIXES:
        if f"{prefix}double_blocks.0.img_attn.qkv.weight" in header.tensors:
            return prefix
    if any(name.startswith("transformer_blocks.") for name in header.tensors):
        raise ValueError(
            f"{header.path} has diffusers' names (transformer_blocks...); use the file in the original (BFL) names"
        )
    first = next(iter(header.tensors), "no tensor")
    raise ValueError(
        f"{header.path} is no Flux.1 transformer (its first tensor is {shown(first)[1:-1]}); use a Flux.1 file"
    )


def _shapes(header: CheckpointHeader, prefix: str) -> dict[str, tuple[int, ...]]:
    """The shapes by canonical name."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, entry in header.tensors.items():
        if name.startswith(prefix):
            canonical = canonical_name(name[len(prefix) :])
            if canonical in shapes:
                raise ValueError(
                    f"{header.path} holds {canonical} twice, also as {shown(name)}; which of them counts is not known, "
                    "use a file with one of them"
                )
            shapes[canonical] = entry.shape
    return shapes


def _refuse_other_models(path: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
    model = _foreign(shapes)
    if model is not None:
        raise ValueError(f"{path} is {model}, not Flux.1; use a Flux.1 file")


def _refuse_other_formats(header: CheckpointHeader, prefix: str) -> None:
    """Weights are read in fp32, fp16, bf16 and fp8, the last also with one scale a matrix; nothing finer or smaller."""
    for name, entry in header.tensors.items():
        if not name.startswith(prefix):
            continue
        scales = name.endswith(SCALE_SUFFIXES)
        if scales and math.prod(entry.shape) != 1:
            raise ValueError(
                f"{header.path}: {name} has shape {list(entry.shape)}, weights with a scale a block (mxfp8, nvfp4) are "
                "not read; use an fp8 file with one scale a matrix, or a bf16 file"
            )
        layer = name.removesuffix(FORMAT_MARK)
        if layer != name and not any(layer + suffix in header.tensors for suffix in SCALE_SUFFIXES):
            raise ValueError(
                f"{header.path}: {layer} is said to be in a format with a scale, and has none; download the file "
                "again, or use another one"
            )
        if name.endswith((".weight", ".bias")) and entry.dtype not in WEIGHT_DTYPES:
            raise ValueError(
                f"{header.path}: {name} is {str(entry.dtype).removeprefix('torch.')}; "
                "use a file in fp32, fp16, bf16 or fp8"
            )


def _shape(path: str, shapes: Mapping[str, tuple[int, ...]], name: str, ndim: int) -> tuple[int, ...]:
    found = shapes.get(name)
    if found is None or len(found) != ndim:
        has = "is missing" if found is None else f"has shape {list(found)}"
        raise ValueError(f"{path}: {name} {has}, Flux.1 has it with {ndim} dimensions; use a complete Flux.1 file")
    return found


def _matrix(path: str, shapes: Mapping[str, tuple[int, ...]], name: str) -> tuple[int, int]:
    rows, columns = _shape(path, shapes, name, 2)
    return rows, columns


def _count(shapes: Mapping[str, tuple[int, ...]], kind: str) -> int:
    """How many blocks of that kind there are. What else the file has under that name is nobody's, and left alone."""
    found = (re.match(rf"{kind}\.(\d+)\.", name, re.ASCII) for name in shapes)
    return len({match[1] for match in found if match})
