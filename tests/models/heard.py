"""Modules without ComfyUI whose attention a tap hears, as the finder of plans hears ComfyUI's."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEARD: list[Callable[..., Tensor]] = [lambda q, k, v, mask, own: own()]
WIDTH = 6


@contextmanager
def tap(attend: Callable[..., Tensor]) -> Iterator[None]:
    """Inside, `attend` is given all attention calls."""
    HEARD.append(attend)
    try:
        yield
    finally:
        HEARD.pop()


def attended(q: Tensor, k: Tensor | None = None, mask: Tensor | None = None, width: int = WIDTH) -> Tensor:
    """Attention of rows (B, S, C) with three heads, values of `width` numbers."""
    k = q if k is None else k
    parts = [each.unflatten(-1, (3, -1)).transpose(1, 2) for each in (q, k[..., : q.shape[-1]], k[..., :width])]
    out = HEARD[-1](*parts, mask, lambda: F.scaled_dot_product_attention(*parts, attn_mask=mask))
    return out.transpose(1, 2).flatten(2)


def block(forward: Callable[..., Any], **attributes: Any) -> nn.Module:
    """A module whose forward is this function of it and the arguments."""
    made = type("Block", (nn.Module,), {"forward": forward})()
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


def noise(*shape: int) -> Tensor:
    """Numbers near one."""
    return 1 + torch.rand(shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape)))
