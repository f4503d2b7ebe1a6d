"""The formats that diffusion models are published in: halves, plain fp8, and fp8 with scales as ComfyUI writes it.

Owns: the tensors of a file of each format, and their values in fp32; how far from stock's a picture in halves may be.
Does not own: where the file lies.
"""

from __future__ import annotations

import copy
import re

import torch

from .client import ComfyClient, Workflow
from .pack_workflows import latent_of, relative_error

FP8 = torch.float8_e4m3fn
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": FP8, "fp8 scaled": FP8, "fp8 scaled, old names": FP8}
SAME_PICTURE, KERNEL_ALLOWANCE = 5e-3, 1.5
OWN_KERNELS = ("attention_sub_quad", "attention_split")  # of ComfyUI, exact, beside attention_pytorch, its server's
BLOCK = re.compile(r"blocks\.\d+\.")


def rounded(whole: dict[str, torch.Tensor], kind: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The tensors of a file of that kind, and their values in fp32."""
    stored, exact = {}, {}
    for name, tensor in whole.items():
        # ComfyUI's fp8 files keep everything but the matrices of the blocks in bf16
        in_fp8 = DTYPES[kind] is FP8 and BLOCK.search(name) is not None and tensor.ndim == 2
        dtype = torch.bfloat16 if DTYPES[kind] is FP8 and not in_fp8 else DTYPES[kind]
        scale = tensor.abs().max() / 448 if in_fp8 and "scaled" in kind else None
        stored[name] = (tensor if scale is None else tensor / scale).to(dtype)
        exact[name] = stored[name].float() * (1 if scale is None else scale)
        if scale is not None and "old" in kind:
            stored[name.replace(".weight", ".scale_weight")] = scale
        elif scale is not None:
            stored[name.replace(".weight", ".weight_scale")] = scale
            text = b'{"format": "float8_e4m3fn"}'
            stored[name.replace(".weight", ".comfy_quant")] = torch.tensor(list(text), dtype=torch.uint8)
    if "old" in kind:
        stored["scaled_fp8"] = torch.zeros(0, dtype=FP8)
    return stored, exact


def behind_model(graph: Workflow, class_type: str, **inputs: object) -> Workflow:
    """The graph with a node between its model and its sampler."""
    graph = copy.deepcopy(graph)
    held = graph["sampler"]["inputs"]["model"]
    graph[class_type] = {"class_type": class_type, "inputs": {"model": held, **inputs}}
    graph["sampler"]["inputs"]["model"] = [class_type, 0]
    return graph


def same_picture(client: ComfyClient, graph: Workflow) -> tuple[torch.Tensor, float]:
    """Stock's latent, and how far from it ours may be: stock itself moves so far with its kernels and threads."""
    stock = latent_of(client, graph)
    settings = [("attention_pytorch", 2), *((kernel, 1) for kernel in OWN_KERNELS)]
    moved = [
        latent_of(client, behind_model(graph, "StockAttention", kernel=kernel, threads=threads))
        for kernel, threads in settings
    ]
    return stock, max(SAME_PICTURE, KERNEL_ALLOWANCE * max(relative_error(each, stock) for each in moved))
