"""What moves stock ComfyUI's own picture in half precision: its own exact attention kernels, and its threads."""

from __future__ import annotations

from typing import Any

import comfy.ldm.modules.attention as attention
import torch
from comfy.patcher_extension import WrappersMP
from comfy_api.latest import io

from .node import node

KERNELS = ("attention_pytorch", "attention_sub_quad", "attention_split", "attention_basic")


@node("StockAttention", kernel=list(KERNELS), gives=[io.Model])
def stock_attention(model: io.Model, kernel: str, threads: int) -> io.NodeOutput:
    """A stock MODEL that attends by one of ComfyUI's own exact kernels, on so many threads."""

    def attend(_: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return getattr(attention, kernel)(*args, **kwargs)

    def on_threads(executor: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            return executor(*args, **kwargs)
        finally:
            torch.set_num_threads(before)

    model = model.clone()
    model.model_options["transformer_options"]["optimized_attention_override"] = attend
    model.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, "stock_attention", on_threads)
    return io.NodeOutput(model)
