"""ComfyUI's own VAE decode, here or with its tiles over the workers, with a clock around the decode alone."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ....parallel_runtime.devices import Device
from ....parallel_runtime.wire.replies import DecodeReply
from ..clock import synchronized_s
from ..contract.comfyui import VAE, comfy, comfy_nodes
from ..contract.version import refuse_off
from ..panel.progress import NodeText
from .parallel_decode import CannotShareError, decode_over


@dataclass(frozen=True, kw_only=True)
class DecodeRecord:
    """Seconds of one decode, where it ran and on what.

    `ranks` is what each rank says of its tiles, `load_s` how long they waited for the weights; `note`: why ranks that
    were asked for did not decode.
    """

    decode_s: float
    device: torch.device
    latent_shape: tuple[int, ...]
    image_shape: tuple[int, ...]
    devices: tuple[Device, ...] = ()
    load_s: float = 0.0
    num_tiles: int = 0
    ranks: Sequence[DecodeReply] = ()
    note: str = ""


def decode(vae: VAE, latent: dict, devices: tuple[Device, ...] = ()) -> tuple[torch.Tensor, DecodeRecord]:
    """What VAE Decode does: (B, H, W, 3) in 0 to 1. The VAE is loaded before the clock starts.

    With `devices`, what VAE Decode (Tiled) does, by their workers; where they cannot, VAE Decode and a note. Raises
    `PoolError` when one of them fails, ComfyUI's interrupt when the user cancels, and its error for a VAE without
    weights, as Load Checkpoint gives it of a file that has none.
    """
    refuse_off("clock")
    if isinstance(vae, VAE):
        vae.throw_exception_if_invalid()
    if not devices:
        return _decode_here(vae, latent)
    try:
        return _decode_there(vae, latent, devices)
    except CannotShareError as reason:
        note = f"VAE Decode ran in ComfyUI, untiled: {reason}"
        NodeText().say(note)
        return _decode_here(vae, latent, note=note)


def _decode_here(vae: VAE, latent: dict, *, note: str = "") -> tuple[torch.Tensor, DecodeRecord]:
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
        decode_s=decode_s,
        device=vae.device,
        latent_shape=tuple(samples.shape),
        image_shape=tuple(image.shape),
        note=note,
    )


def _decode_there(vae: VAE, latent: dict, devices: tuple[Device, ...]) -> tuple[torch.Tensor, DecodeRecord]:
    started_s: list[float] = []
    shared = decode_over(vae, latent, devices, clock=lambda: started_s.append(synchronized_s(vae.output_device)))
    decode_s = synchronized_s(vae.output_device) - started_s[0]
    return shared.image, DecodeRecord(
        decode_s=decode_s,
        device=torch.device(devices[0].kind, devices[0].index),
        latent_shape=tuple(latent["samples"].shape),
        image_shape=tuple(shared.image.shape),
        devices=devices,
        load_s=shared.load_s,
        num_tiles=shared.num_tiles,
        ranks=shared.ranks,
    )
