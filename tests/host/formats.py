"""How far from stock's a picture in halves may be, and which matrices a file in a format of fewer bits rounds."""

import itertools
import re

import torch

from .client import ComfyClient, Workflow
from .pack_workflows import latent_of, relative_error
from .workflows import between

SAME_PICTURE, KERNEL_ALLOWANCE = 5e-3, 1.5
KERNELS = ("attention_pytorch", "attention_sub_quad", "attention_split")  # of ComfyUI, exact; the first its server's
THREADS = (1, 2)  # its server has one
BLOCK = re.compile(r"blocks\.\d+\.")


def same_picture(client: ComfyClient, graph: Workflow, *, least: float = SAME_PICTURE) -> tuple[torch.Tensor, float]:
    """Stock's latent, and how far from it ours may be: at least that, else by what stock itself moves here."""
    stock = latent_of(client, graph)
    return stock, allowed_by(stock_moves(client, graph, stock), least=least)


def stock_moves(client: ComfyClient, graph: Workflow, stock: torch.Tensor) -> float:
    """How far stock is from its own latent on this machine with its other exact kernels and numbers of threads, and
    with what its sampler rounds between the steps: two of them from a noise 700 times the latent lose 1e-5."""
    ways = [{"kernel": kernel, "threads": threads} for kernel, threads in itertools.product(KERNELS, THREADS)]
    ways[0]["double"] = True  # else the way of its server
    return max(relative_error(latent_of(client, between(graph, "way", "StockAttention", **way)), stock) for way in ways)


def allowed_by(moved: float, *, least: float) -> float:
    """How far from stock ours may be where stock moves so far by itself.

    Processors round otherwise than one another, so no number that one of them showed can be the bound of all.
    """
    return max(least, KERNEL_ALLOWANCE * moved)
