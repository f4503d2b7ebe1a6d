"""What ComfyUI would compute a model in."""

import comfy.model_management
import comfy.utils
import torch
from comfy.supported_models_base import BASE


def compute_dtype(
    weight_dtype: str, weights: dict[str, torch.Tensor], model_config: BASE, device: torch.device
) -> torch.dtype:
    """The dtype that `weight_dtype` says; `default` is what ComfyUI would choose for these weights on `device`."""
    if weight_dtype != "default":
        return getattr(torch, weight_dtype)
    management = comfy.model_management
    if getattr(model_config, "quant_config", None) is not None:  # its layers say by themselves what they are kept in
        return management.unet_manual_cast(None, device, model_config.supported_inference_dtypes) or torch.bfloat16
    stored = management.unet_dtype(
        device=device,
        model_params=comfy.utils.calculate_parameters(weights),
        supported_dtypes=model_config.supported_inference_dtypes,
        weight_dtype=comfy.utils.weight_dtype(weights),
    )
    return management.unet_manual_cast(stored, device, model_config.supported_inference_dtypes) or stored
