"""ComfyUI's attention function, as the finder of plans sees it: every call in one form.

Does not own what is found of it (models/finder).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from .attention import installed
from .stock_attention import split_heads


@contextmanager
def attention_to(attend: Callable[..., Tensor]) -> Iterator[None]:
    """Inside, attention calls that no plan shares go to `attend(q, k, v, mask, own)`.

    q, k, v and what it returns are (B, H, S, D); `own()` computes what ComfyUI's function would.
    """
    switch = installed()
    stock = switch.kernel.stock

    def attention(
        q: Any,  # noqa: ANN401  a tensor, or a container of one; k and v too
        k: Any,  # noqa: ANN401
        v: Any,  # noqa: ANN401
        heads: int,
        mask: Any = None,  # noqa: ANN401
        attn_precision: Any = None,  # noqa: ANN401
        skip_reshape: bool = False,
        skip_output_reshape: bool = False,
        **options: Any,  # noqa: ANN401
    ) -> Tensor:
        q, k, v = map(switch.kernel.take, (q, k, v))

        def own() -> Tensor:
            out = stock(q, k, v, heads, mask, attn_precision, skip_reshape, True, **options)
            return out

        if skip_reshape:
            parts = q, k, v
        else:
            width = q.shape[-1] // heads
            parts = split_heads(q, width), split_heads(k, width), split_heads(v, width)
        out = attend(*parts, mask, own)
        return out if skip_output_reshape else out.transpose(1, 2).flatten(2)

    switch.kernel.stock, switch.handed_on = attention, True
    try:
        yield
    finally:
        switch.kernel.stock, switch.handed_on = stock, False
