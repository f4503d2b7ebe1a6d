"""diffusers: one process, or its own context parallel (`enable_parallelism` with Ulysses or ring attention).

What CPU torch needs is changed in this process only: diffusers asks for an accelerator, and its ring for a kernel that
returns the log-sum-exp. On a GPU it runs as shipped, with its cuDNN attention where the ring needs that kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import ContextParallelConfig, FluxTransformer2DModel
from diffusers.models import attention_dispatch

from .process import Forward, Place, as_diffusers, serve


def make_forward(place: Place) -> Forward:
    """The model of the file, split as the place says."""
    oracle = place.oracle()
    if place.ranks > 1:
        parallelize(oracle.model, place)
        return torch.inference_mode()(lambda inputs: run(oracle.model, inputs, place.dtype))
    return oracle


def run(model: FluxTransformer2DModel, inputs: Any, dtype: torch.dtype) -> torch.Tensor:  # noqa: ANN401
    """One call; the hooks of the context parallel split what goes in and gather what comes out."""
    return model(**as_diffusers(inputs, dtype), return_dict=False)[0]


def parallelize(model: FluxTransformer2DModel, place: Place) -> None:
    """diffusers' context parallel over all ranks."""
    if place.device.type == "cpu":
        torch.accelerator.device_count = lambda: 1
        if place.ring > 1:
            attention_dispatch._native_attention_forward_op = flash_on_cpu
    elif place.ring > 1:
        model.set_attention_backend("_native_cudnn")
    model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=place.ulysses, ring_degree=place.ring))


def flash_on_cpu(
    _ctx: object,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: object = None,
    _dropout: float = 0.0,
    _causal: bool = False,
    _scale: object = None,
    _gqa: bool = False,
    return_lse: bool = False,
    **_: object,
) -> Any:  # noqa: ANN401
    """What diffusers' native attention does, with the log-sum-exp. All (B, S, H, D); the log-sum-exp (B, S, H)."""
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)
    out, lse = out.transpose(1, 2), lse.transpose(1, 2)
    return (out, lse) if return_lse else out


if __name__ == "__main__":
    place = Place.parse()
    torch.set_num_interop_threads(1)
    place.join()
    serve(place, make_forward(place))
