"""The formats that ComfyUI's `comfy.quant_ops` has, as files hold them: blocks rounded by ComfyUI's own kernels.

Needs comfy_kitchen, which comes with ComfyUI, and nothing of ComfyUI itself.
"""

import json
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .formats import BLOCK
from .outcomes import StockFailsError

ROTATED = 64  # channels that are rotated together; published files have 256
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Format:
    """How a layer is stored: in fp8 of `dtype`, else by a layout of comfy_kitchen; what the file says of it."""

    name: str  # of `comfy.quant_ops.QUANT_ALGOS`
    layout: str = ""
    dtype: torch.dtype | None = None
    options: dict[str, Any] = field(default_factory=dict)
    said: dict[str, Any] = field(default_factory=dict)  # beside the name
    inputs: dict[str, float] = field(default_factory=dict)  # what the file has for the layer's input
    smoothed: bool = False  # channels of the input have scales of their own

    def stored(self, layer: str, weight: torch.Tensor) -> Tensors:
        """A layer's tensors by their names in a file."""
        found = self._rounded(weight.float())
        found |= {name: torch.tensor(value) for name, value in self.inputs.items()}
        if self.smoothed:
            found["pre_quant_scale"] = torch.linspace(0.5, 1.5, weight.shape[1])
        found["comfy_quant"] = mark({"format": self.name} | self.said)
        return {f"{layer}.{name}": tensor.contiguous() for name, tensor in found.items()}

    def _rounded(self, weight: torch.Tensor) -> Tensors:
        if self.dtype is not None:
            scale = weight.abs().max() / torch.finfo(self.dtype).max
            return {"weight": (weight / scale).to(self.dtype), "weight_scale": scale}
        from comfy_kitchen.tensor import QuantizedTensor

        try:
            rounded = QuantizedTensor.from_float(weight, self.layout, **self.options)
        except KeyError as error:
            if self.layout not in error.args:
                raise
            raise StockFailsError(f"this ComfyUI's comfy_kitchen has no {self.layout}") from error
        found: Tensors = rounded.state_dict("weight")
        return found


def mark(said: object) -> torch.Tensor:
    """What a file says of a layer, as it holds it."""
    return torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)


KITCHEN_INT8, KITCHEN_W4A4 = "TensorWiseINT8Layout", "TensorCoreConvRotW4A4Layout"
ROW = {"per_channel": True}
ROTATION = {"convrot": True, "convrot_groupsize": ROTATED}
W4A4 = {"convrot_groupsize": ROTATED}
W4A8 = W4A4 | {"linear_dtype": "int8"}
FP8 = Format("float8_e4m3fn", dtype=torch.float8_e4m3fn)
NVFP4 = Format("nvfp4", "TensorCoreNVFP4Layout")
INT8_ROTATED = Format("int8_tensorwise", KITCHEN_INT8, options=ROW | ROTATION, said=ROTATION)
FORMATS: dict[str, Format] = {
    "fp8 e4m3": FP8,
    "fp8 e4m3, products in full": replace(FP8, said={"full_precision_matrix_mult": True}),
    "fp8 e4m3, scale of the input": replace(FP8, inputs={"input_scale": 0.02}),
    "fp8 e5m2": Format("float8_e5m2", dtype=torch.float8_e5m2),
    "nvfp4": NVFP4,
    "nvfp4, scale of the input": replace(NVFP4, inputs={"input_scale": 0.02}),
    "nvfp4, smoothed": replace(NVFP4, smoothed=True),
    "mxfp8": Format("mxfp8", "TensorCoreMXFP8Layout"),
    "int8": Format("int8_tensorwise", KITCHEN_INT8),
    "int8, a scale a row": Format("int8_tensorwise", KITCHEN_INT8, options=ROW),
    "int8, rotated": INT8_ROTATED,
    "w4a4, rotated": Format("convrot_w4a4", KITCHEN_W4A4, options=W4A4, said=W4A4),
    "w4a4, rotated, int8 products": Format("convrot_w4a4", KITCHEN_W4A4, options=W4A8, said=W4A8),
}
MIXED = "mixed"  # of three formats and plain layers, one after the other
TOLD_IN_THE_HEADER = "nvfp4, told in the header"
KINDS = (*FORMATS, MIXED, TOLD_IN_THE_HEADER)


def quantised(whole: Tensors, kind: str) -> tuple[Tensors, dict[str, str]]:
    """The tensors of a file of that kind, and what its header says. All but the blocks' matrices is bf16."""
    stored: Tensors = {}
    said: dict[str, Any] = {}
    turns: list[Format | None] = [FP8, NVFP4, INT8_ROTATED, None]
    for name, tensor in whole.items():
        matrix = BLOCK.search(name) is not None and tensor.ndim == 2 and name.endswith(".weight")
        each = turns[len(stored) % len(turns)] if kind == MIXED else FORMATS.get(kind, NVFP4)
        if not matrix or each is None:
            stored[name] = tensor.to(torch.bfloat16)
            continue
        layer = name.removesuffix(".weight")
        stored |= each.stored(layer, tensor)
        if kind == TOLD_IN_THE_HEADER:
            said[layer] = json.loads(bytes(stored.pop(f"{layer}.comfy_quant").tolist()))
    if not said:
        return stored, {}
    return stored, {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": said})}
