"""What moves stock ComfyUI's own picture: its exact kernels, its threads, its batches, and its sampler's precision."""

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


def sides_apart(function: Any, given: dict[str, Any]) -> torch.Tensor:
    """One call of the model for each side of guidance; what one is given is its part of the batch."""
    sides, rows = len(given["cond_or_uncond"]), len(given["input"])

    def part(value: Any, side: int, name: str = "") -> Any:
        if name in ("cond_or_uncond", "uuids"):
            return value[side : side + 1]
        if isinstance(value, dict):
            return {key: part(each, side, key) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(part(each, side) for each in value)
        if isinstance(value, torch.Tensor) and value.ndim and len(value) == rows:
            return value.chunk(sides)[side]
        return value

    return torch.cat(
        [
            function(part(given["input"], side), part(given["timestep"], side), **part(given["c"], side))
            for side in range(sides)
        ]
    )


@node("StockAttention", kernel=list(KERNELS), gives=[io.Model])
def stock_attention(
    model: io.Model, kernel: str, threads: int, double: bool = False, apart: bool = False
) -> io.NodeOutput:
    """A stock MODEL that attends by one of ComfyUI's own exact kernels, on so many threads.

    `double`: its sampler goes from step to step in double precision, around the same model. `apart`: the model is
    called once for each side of guidance, not with both in one batch.
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
    if apart:
        model.set_model_unet_function_wrapper(sides_apart)
    return io.NodeOutput(model)
