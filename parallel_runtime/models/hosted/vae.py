"""ComfyUI's own VAE in a rank: its class found by `comfy.sd.VAE` from the weights alone, as ComfyUI's loader finds it.

Owns the making of the module. Does not own how its weights come (worker/vae.py), nor how a picture is cut into tiles,
which is ComfyUI's own code in the process that asks.
"""

from collections.abc import Mapping

import torch

from ...checkpoint import ComfyUI
from .comfyui import import_comfyui


def build_vae(
    comfyui: ComfyUI,
    tensors: Mapping[str, torch.Tensor],
    *,
    dtype: torch.dtype,
    metadata: Mapping[str, str],
    device: torch.device,
) -> torch.nn.Module:
    """The VAE that these weights are of, in `dtype`, in host memory. Raises `ValueError` for weights of none."""
    import_comfyui(comfyui, device)
    from comfy.sd import VAE

    module: torch.nn.Module | None = VAE(
        sd=dict(tensors), device=device, dtype=dtype, metadata=dict(metadata)
    ).first_stage_model
    if module is None:
        raise ValueError(f"ComfyUI finds no VAE in {len(tensors)} weights; choose another VAE")
    return module
