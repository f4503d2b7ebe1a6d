"""What moves stock ComfyUI's own picture: its own exact attention kernels, its threads, and its sampler's precision."""

from __future__ import annotations

import copy
from typing import Any

import comfy.ldm.modules.attention as attention
import torch
from comfy.patcher_extension import WrappersMP
from comfy_api.latest import io

from .node import node

KERNELS = ("attention_pytorch", "attention_sub_quad", "attention_split", "attention_basic")


class Doubled:
    """A sampler's model whose latents are in double precision outside of it."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, x: torch.Tensor, *more: Any, **named: Any) -> torch.Tensor:
        return self._model(x.float(), *more, **named).double()


@node("StockAttention", kernel=list(KERNELS), gives=[io.Model])
def stock_attention(model: io.Model, kernel: str, threads: int, double: bool = False) -> io.NodeOutput:
    """A stock MODEL that attends by one of ComfyUI's own exact kernels, on so many threads.

    `double`: its sampler goes from step to step in double precision, around the same model.
    """

    def attend(_: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return getattr(attention, kernel)(*args, **kwargs)

    def on_threads(
        executor: Any, noise: torch.Tensor, latent: torch.Tensor, sampler: Any, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        before, single = torch.get_num_threads(), sampler.sampler_function

        def in_double(model: Any, x: torch.Tensor, *more: Any, **named: Any) -> torch.Tensor:
            return single(Doubled(model), x.double(), *more, **named).float()

        if double:
            sampler = copy.copy(sampler)
            sampler.sampler_function = in_double
        torch.set_num_threads(threads)
        try:
            return executor(noise, latent, sampler, *args, **kwargs)
        finally:
            torch.set_num_threads(before)

    model = model.clone()
    model.model_options["transformer_options"]["optimized_attention_override"] = attend
    model.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, "stock_attention", on_threads)
    return io.NodeOutput(model)
