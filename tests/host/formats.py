"""The formats that diffusion models are published in: halves, plain fp8, and fp8 with scales as ComfyUI writes it.

Owns: the tensors of a file of each format, and their values in fp32; how far from stock's a picture in halves may be.
Does not own: where the file lies.
"""

from __future__ import annotations

import copy
import itertools
import re

import torch

from .client import ComfyClient, Workflow
from .pack_workflows import latent_of, relative_error
from .workflows import node

FP8 = torch.float8_e4m3fn
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": FP8, "fp8 scaled": FP8, "fp8 scaled, old names": FP8}
SAME_PICTURE, KERNEL_ALLOWANCE = 5e-3, 1.5
KERNELS = ("attention_pytorch", "attention_sub_quad", "attention_split")  # of ComfyUI, exact; the first its server's
THREADS = (1, 2)  # its server has one
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
    graph[class_type] = node(class_type, model=held, **inputs)
    graph["sampler"]["inputs"]["model"] = [class_type, 0]
    return graph


def same_picture(client: ComfyClient, graph: Workflow, *, least: float = SAME_PICTURE) -> tuple[torch.Tensor, float]:
    """Stock's latent, and how far from it ours may be: at least that, else by what stock itself moves here."""
    stock = latent_of(client, graph)
    return stock, allowed_by(stock_moves(client, graph, stock), least=least)


def stock_moves(client: ComfyClient, graph: Workflow, stock: torch.Tensor) -> float:
    """How far stock is from its own latent on this machine with its other exact kernels and numbers of threads, and
    with what its sampler rounds between the steps: two of them from a noise 700 times the latent lose 1e-5."""
    ways = [{"kernel": kernel, "threads": threads} for kernel, threads in itertools.product(KERNELS, THREADS)]
    ways[0]["double"] = True  # else the way of its server
    return max(relative_error(latent_of(client, behind_model(graph, "StockAttention", **way)), stock) for way in ways)


def allowed_by(moved: float, *, least: float) -> float:
    """How far from stock ours may be where stock moves so far by itself.

    Processors round otherwise than one another, so no number that one of them showed can be the bound of all.
    """
    return max(least, KERNEL_ALLOWANCE * moved)
