"""What ComfyUI would compute a model in."""

from collections.abc import Mapping
from typing import Any

import torch

from ...checkpoint import FP8


def compute_dtype(
    weight_dtype: str,
    weights: Mapping[str, torch.Tensor],
    model_config: Any,  # noqa: ANN401  comfy.supported_models_base.BASE
    device: torch.device,
) -> torch.dtype:
    """The dtype that `weight_dtype` says; `default` is what ComfyUI would choose for these weights on `device`.

    For one of `FP8`, what ComfyUI casts such weights to.
    """
    if weight_dtype not in ("default", *FP8):
        found: torch.dtype = getattr(torch, weight_dtype)
        return found
    import comfy.model_management as management
    import comfy.utils

    supported = model_config.supported_inference_dtypes
    if weight_dtype in FP8:
        return management.unet_manual_cast(FP8[weight_dtype], device, supported) or torch.float32
    if getattr(model_config, "quant_config", None) is not None:  # its layers say by themselves what they are kept in
        return management.unet_manual_cast(None, device, supported) or torch.bfloat16
    stored = management.unet_dtype(
        device=device,
        model_params=comfy.utils.calculate_parameters(weights),
        supported_dtypes=supported,
        weight_dtype=comfy.utils.weight_dtype(weights),
    )
    return management.unet_manual_cast(stored, device, supported) or stored
