"""ComfyUI's own VAE decode, with a clock around the decode alone."""

from dataclasses import dataclass

import comfy.model_management
import nodes as comfy_nodes
import torch
from comfy.sd import VAE

from .clock import synchronized_s


@dataclass(frozen=True, kw_only=True)
class DecodeRecord:
    """Seconds of one decode, where it ran and on what."""

    decode_s: float
    device: torch.device
    latent_shape: tuple[int, ...]
    image_shape: tuple[int, ...]


def decode(vae: VAE, latent: dict) -> tuple[torch.Tensor, DecodeRecord]:
    """What VAE Decode does: (B, H, W, 3) in 0 to 1. The VAE is loaded before the clock starts."""
    samples = latent["samples"]
    comfy.model_management.load_models_gpu(
        [vae.patcher],
        memory_required=vae.memory_used_decode(samples.shape, vae.vae_dtype),
        force_full_load=vae.disable_offload,
    )
    started_s = synchronized_s(vae.device)
    (image,) = comfy_nodes.VAEDecode().decode(vae, latent)
    decode_s = synchronized_s(vae.device) - started_s
    return image, DecodeRecord(
        decode_s=decode_s, device=vae.device, latent_shape=tuple(samples.shape), image_shape=tuple(image.shape)
    )
