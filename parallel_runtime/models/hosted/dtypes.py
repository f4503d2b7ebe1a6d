"""What ComfyUI would load a model's weights as, and compute it in."""

from collections.abc import Mapping
from typing import Any

import torch

from ...checkpoint import FP8


def loaded_dtypes(
    weight_dtype: str,
    weights: Mapping[str, torch.Tensor],
    model_config: Any,  # noqa: ANN401  comfy.supported_models_base.BASE
    device: torch.device,
) -> tuple[torch.dtype, str]:
    """What ComfyUI would compute these weights in on `device`, and which of `FP8` it would load them as; "" for none.

    `weight_dtype` says the first, or one of `FP8` both; of what it leaves open, ComfyUI's own rules and options decide.
    """
    import comfy.model_management as management
    import comfy.utils

    supported = model_config.supported_inference_dtypes
    said: torch.dtype | None = None if weight_dtype in ("default", *FP8) else getattr(torch, weight_dtype)
    if weight_dtype in FP8:
        return management.unet_manual_cast(FP8[weight_dtype], device, supported) or torch.float32, weight_dtype
    if getattr(model_config, "quant_config", None) is not None:  # its layers say by themselves what they are kept in
        return said or management.unet_manual_cast(None, device, supported) or torch.bfloat16, ""
    stored = management.unet_dtype(
        device=device,
        model_params=comfy.utils.calculate_parameters(weights),
        supported_dtypes=supported,
        weight_dtype=comfy.utils.weight_dtype(weights),
    )
    kept = next((name for name, dtype in FP8.items() if dtype == stored), "")
    return said or management.unet_manual_cast(stored, device, supported) or stored, kept
