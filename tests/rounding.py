"""How far apart two exact results in fp32 may be on this machine: ROUNDING, relative, which tests allow.

ComfyUI has several exact kernels of attention and any number of threads, and they round otherwise than one another, on
each processor by another amount. So what is allowed is what they differ by here, in a chain of blocks, times MARGIN.
The first process of a run measures it, those that it starts are told: one that has had two threads must not be forked.
"""

import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import gelu, layer_norm, linear, scaled_dot_product_attention

BATCH, TOKENS, HEADS, WIDTH, BLOCKS = 2, 70, 4, 64, 8
THREADS = (1, 2)  # a rank's, and one more
MARGIN = 32  # the models of tests are deeper, magnify more, are called several times, and add in further orders
TOLD = "TESTS_ROUNDING"  # the variable that has it

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """ComfyUI's attention_pytorch on a CPU."""
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        return scaled_dot_product_attention(q, k, v)


def unfused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same call where no fused kernel takes it."""
    with sdpa_kernel([SDPBackend.MATH]):
        return scaled_dot_product_attention(q, k, v)


def by_products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """ComfyUI's attention_basic: one product, the softmax, one more product."""
    return (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1) @ v


def chain(attention: Attention) -> Tensor:
    """What blocks of a transformer with seeded weights make of seeded tokens, (B, S, D) in fp32."""
    numbers = torch.Generator().manual_seed(0)

    def weight(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=numbers) / columns**0.5

    x = torch.randn(BATCH, TOKENS, WIDTH, generator=numbers)
    for _ in range(BLOCKS):
        projected = linear(layer_norm(x, (WIDTH,)), weight(3 * WIDTH, WIDTH)).unflatten(-1, (3, HEADS, -1))
        q, k, v = projected.permute(2, 0, 3, 1, 4)
        x = x + linear(attention(q, k, v).transpose(1, 2).flatten(2), weight(WIDTH, WIDTH))
        widened = linear(layer_norm(x, (WIDTH,)), weight(4 * WIDTH, WIDTH))
        x = x + linear(gelu(widened), weight(WIDTH, 4 * WIDTH))
    return x


def kernels_differ(attentions: Sequence[Attention] = (fused, unfused, by_products)) -> float:
    """The largest relative difference of two of a machine's exact ways: each kernel with each number of threads."""
    before, found = torch.get_num_threads(), []
    try:
        for threads in THREADS:
            torch.set_num_threads(threads)
            found += [chain(attention) for attention in attentions]
    finally:
        torch.set_num_threads(before)
    return max(float((each - other).norm() / other.norm()) for each in found for other in found)


ROUNDING = float(os.environ.get(TOLD) or MARGIN * kernels_differ())
os.environ[TOLD] = str(ROUNDING)
