"""Files in ComfyUI's quantised formats: what is wrong with one is said before it is loaded; no copies stay.

Owns both. The formats themselves, how they are loaded and how they compute, are ComfyUI's (`comfy.quant_ops`,
`comfy.ops`): a weight that a file says a format of is a tensor of another class, made of plain ones.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch

from ...checkpoint import FAST, FP8, shown
from ...wire.protocol import dtype_name
from ..parts import as_parameter, plain_parts

MARK = ".comfy_quant"  # of a layer: a JSON text, {"format": ...}
HEADER, OLD_MARK = "_quantization_metadata", "scaled_fp8"  # the same for all layers: in the header, and of old files
SCALE = ".weight_scale"
FROM_INPUT = {"input_scale", "pre_quant_scale"}  # what a format may have for a layer's input, and need not
# What a layer of a format has in a file, where ComfyUI's `parameters` of the format do not say it.
NEEDED = {name: {"weight_s_rel", "weight_s_channel"} for name in ("asym_w4a8_int8", "w6a8_int8")}
# Relative errors of a call, at most. A number that a last digit sends to the other side of a step moves what follows,
# in a deep model by as much as the rounding itself: stock ComfyUI is so far from itself with its other exact attention
# functions (docs/formats.md).
COARSE = {"int8_tensorwise": 2e-2}
COARSEST = 0.1


def check_formats(path: str, weights: Mapping[str, torch.Tensor]) -> None:
    """Raise `ValueError` for a layer whose format this ComfyUI does not know, or which lacks what its format needs.

    `weights`: by ComfyUI's names, after ComfyUI has written older names anew. Reads marks alone.
    """
    import comfy.quant_ops

    known: dict[str, dict[str, Any]] = comfy.quant_ops.QUANT_ALGOS
    marked = {name.removesuffix(MARK): _said(path, name, mark) for name, mark in weights.items() if name.endswith(MARK)}
    for layer, said in marked.items():
        _check_layer(f"{path}: {shown(layer)[1:-1]}", layer, said.get("format"), known, weights)
    for name, weight in weights.items():
        layer = name.removesuffix(".weight")
        packed = weight.dtype in (torch.int8, torch.uint8) and weight.ndim > 1
        scaled = weight.dtype.itemsize == 1 and layer + SCALE in weights
        if name.endswith(".weight") and layer not in marked and (packed or scaled):
            raise ValueError(
                f"{path}: {shown(layer)[1:-1]} holds {dtype_name(weight.dtype)}{' with a scale' if scaled else ''}, "
                f"and nothing says its format (there is no {MARK[1:]} of it); use a file that was quantised for ComfyUI"
            )


def _check_layer(
    where: str, layer: str, name: object, known: Mapping[str, Mapping[str, Any]], weights: Mapping[str, torch.Tensor]
) -> None:
    if not isinstance(name, str) or name not in known:
        raise ValueError(
            f"{where} is in the format {shown(name)}, and this ComfyUI has {', '.join(sorted(known))}; "
            "update ComfyUI, or use a file in one of those"
        )
    if name == "mxfp8" and not hasattr(torch, "float8_e8m0fnu"):
        raise ValueError(
            f"{where} is in the format mxfp8, whose scales torch {torch.__version__} has no dtype for; "
            "use torch 2.7 or newer, or a file in another format"
        )
    weight = weights.get(f"{layer}.weight")
    if weight is None:  # which the class may lack as well
        return
    stored = known[name]["storage_t"]
    needed = NEEDED.get(name) or known[name]["parameters"] - FROM_INPUT
    missing = [each for each in sorted(needed) if f"{layer}.{each}" not in weights]
    if missing:
        raise ValueError(
            f"{where} is in the format {name} and lacks its {missing[0]}, without which its numbers mean nothing; "
            "download the file again, or use another one"
        )
    if not _alike(weight.dtype, stored):
        raise ValueError(
            f"{where} is said to be in the format {name}, whose numbers are {dtype_name(stored)}, and holds "
            f"{dtype_name(weight.dtype)}; download the file again, or use another one"
        )


def check_metadata(path: str, metadata: Mapping[str, str]) -> None:
    """Raise `ValueError` where a file's header tells the formats of its layers in a way that cannot be read."""
    text = metadata.get(HEADER)
    if text is None:
        return
    told = _json(text)
    layers = told.get("layers") if isinstance(told, dict) else None
    if not isinstance(layers, dict):
        raise ValueError(
            f"{path}: {HEADER} in its header is not a JSON object with layers; "
            "download the file again, or use another one"
        )


def formats_of(weights: Mapping[str, torch.Tensor]) -> set[str]:
    """The formats of a file's layers, which `check_formats` has taken."""
    return {str(_said("", name, mark).get("format")) for name, mark in weights.items() if name.endswith(MARK)}


def coarse_inputs(
    config: Any,  # noqa: ANN401  a BASE of ComfyUI
    weights: Mapping[str, torch.Tensor],
    kept: str = "",
) -> float:
    """How much rounding of layers' inputs may move a shared call's output, at most: 0 where none rounds them.

    `kept`: the fp8 that weights are rounded to when they are loaded. Where a device does not multiply in a format,
    ComfyUI widens the weights and rounds nothing.
    """
    if kept:
        import comfy.ops

        chosen = comfy.ops.pick_operations(None, None, fp8_optimizations=kept.endswith(FAST))
        return COARSEST if chosen is comfy.ops.fp8_ops and FP8[kept] == torch.float8_e4m3fn else 0.0
    marks = [_said("", name, mark) for name, mark in weights.items() if name.endswith(MARK)]
    formats = {str(said.get("format")) for said in marks if not said.get("full_precision_matrix_mult")}
    if not formats:
        return 0.0
    return max((COARSE.get(each, COARSEST) for each in formats - _without_product(config)), default=0.0)


def widened_formats(config: Any, weights: Mapping[str, torch.Tensor]) -> tuple[str, ...]:  # noqa: ANN401  a BASE
    """The formats of a file in which ComfyUI's device does not multiply: their weights are widened in each step."""
    formats = formats_of(weights)
    return tuple(sorted(formats & _without_product(config))) if formats else ()


def _without_product(config: Any) -> set[str]:  # noqa: ANN401  a BASE
    import comfy.ops

    return set(getattr(comfy.ops.pick_operations(None, None, model_config=config), "_disabled", ()))


def says_formats(names: Iterable[str], metadata: Mapping[str, str]) -> bool:
    """Whether a file says formats of its layers, in one of the ways that ComfyUI reads."""
    return HEADER in metadata or any(name.endswith((MARK, OLD_MARK)) for name in names)


def give_back_copies(module: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.dtype]:
    """Have the layers of a module, just loaded, hold the file's own tensors where loading made copies of them.

    ComfyUI widens the plain matrices of a quantised file when it loads them, and torch copies the scales of the others.
    Returns the dtypes of what was widened, by name; `weights` are the file's tensors.
    """
    declared = {}
    for path, layer in module.named_modules():
        for name, weight in list(layer.named_parameters(recurse=False)):
            full = f"{path}.{name}" if path else name
            stored = weights.get(full)
            if hasattr(weight, "__tensor_flatten__"):
                layer._parameters[name] = _of_file(weight, full, weights)
            elif stored is not None and name == "weight" and weight.dtype != stored.dtype and _widened(stored, weight):
                declared[full] = weight.dtype
                layer._parameters[name] = torch.nn.Parameter(stored, requires_grad=False)
    return declared


def _of_file(weight: torch.Tensor, name: str, weights: Mapping[str, torch.Tensor]) -> torch.nn.Parameter:
    """A quantised weight, made of the file's tensors as far as they are the same bytes."""
    parts, make = plain_parts(weight)
    named = cast(Any, weight).state_dict(name)  # the parts by the file's names
    stored = {id(part): weights.get(full) for full, part in named.items()}
    found = []
    for part in parts:
        same = stored.get(id(part))
        if same is not None and same.nbytes == part.nbytes and same.dtype in (part.dtype, torch.uint8, torch.int8):
            part = same.view(part.dtype).reshape(part.shape)
        found.append(part)
    return as_parameter(make(found))


def _widened(stored: torch.Tensor, weight: torch.Tensor) -> bool:
    return stored.is_floating_point() and stored.shape == weight.shape and stored.dtype.itemsize < weight.dtype.itemsize


def _said(path: str, name: str, mark: torch.Tensor) -> dict[str, Any]:
    said = _json(bytes(mark.flatten().tolist())) if mark.dtype == torch.uint8 else None
    if not isinstance(said, dict):
        raise ValueError(
            f"{path}: {shown(name)[1:-1]} is not the JSON text of a format; download the file again, or use another one"
        )
    return said


def _json(text: str | bytes) -> Any:  # noqa: ANN401  None for what is none
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _alike(dtype: torch.dtype, stored: torch.dtype) -> bool:
    """Whether ComfyUI takes numbers of one dtype for those of a format: it casts floats, as of old files in e5m2."""
    if dtype.is_floating_point and stored.is_floating_point:
        return True
    whole = not dtype.is_floating_point and not stored.is_floating_point
    return dtype == stored or (whole and dtype.itemsize == stored.itemsize)
