"""VAEs of ComfyUI's own classes with random weights, latents for them, and how far two pictures are apart.

Small ones, but for classes that have one size: HunyuanVideo's, Wan 2.2's, MiniMax H3's.
"""

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import comfy.ldm.lightricks.vae.causal_video_autoencoder as lightricks
import comfy.ldm.wan.vae
import comfy.ldm.wan.vae2_2
import nodes as comfy_nodes
import torch
from comfy.ldm.models.autoencoder import AutoencoderKL, AutoencodingEngine
from comfy.sd import VAE
from comfy_api.latest import io

from .node import node

PACK = ".nodes.host.vae.parallel_decode"
LEVELS = {"ch_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0, "resolution": 256}
IMAGES = {"double_z": True, "in_channels": 3, "out_ch": 3, **LEVELS}
ONE = ["res_x", {"num_layers": 1}]
LTX = {
    **{"_class_name": "CausalVideoAutoencoder", "dims": 3, "in_channels": 3, "out_channels": 3, "patch_size": 4},
    **{"latent_channels": 128, "norm_layer": "pixel_norm", "latent_log_var": "uniform", "use_quant_conv": False},
    **{"causal_decoder": False, "decoder_base_channels": 16, "encoder_base_channels": 16},
    "encoder_blocks": [ONE, ["compress_all", {}]] * 3,
    "decoder_blocks": [*[ONE, ["compress_all", {"residual": True, "multiplier": 2}]] * 3, ONE],
}


def two_sided(width: int, channels: int, **more: Any) -> dict[str, Any]:
    """An encoder as wide as ComfyUI makes every one, and a decoder of that width."""
    wide = {**IMAGES, "ch": 128, "z_channels": channels, **more}
    return {"ddconfig": wide, "decoder_ddconfig": {**wide, "ch": width}}


def engine(channels: int) -> torch.nn.Module:
    """Flux's."""
    sides, parts = two_sided(32, channels), "comfy.ldm.modules.diffusionmodules.model"
    return AutoencodingEngine(
        regularizer_config={"target": "comfy.ldm.models.autoencoder.DiagonalGaussianRegularizer"},
        encoder_config={"target": f"{parts}.Encoder", "params": sides["ddconfig"]},
        decoder_config={"target": f"{parts}.Decoder", "params": sides["decoder_ddconfig"]},
    )


def wan(**sizes: Any) -> torch.nn.Module:
    """Wan's and Qwen-Image's."""
    sizes = {"dim": 8, "z_dim": 16, "conv_out_channels": 3, "image_channels": 3} | sizes
    blocks = {"dim_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_scales": [], "dropout": 0.0}
    return comfy.ldm.wan.vae.WanVAE(**sizes, **blocks, temperal_downsample=[False, True, True])


def hunyuan_video() -> torch.nn.Module:
    """As wide as ComfyUI takes every one of this kind to be."""
    config = {**IMAGES, "ch": 128, "z_channels": 16, "conv3d": True, "time_compress": 4}
    return AutoencoderKL(ddconfig=config, embed_dim=16)


def wan_22() -> torch.nn.Module:
    """As wide as ComfyUI takes every one of this kind to be."""
    config = {"dim": 160, "z_dim": 48, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_scales": []}
    return comfy.ldm.wan.vae2_2.WanVAE(**config, temperal_downsample=[False, True, True], dropout=0.0)


MODULES: dict[str, Callable[[], torch.nn.Module]] = {
    "flux": lambda: engine(16),
    "flux.2": lambda: AutoencoderKL(embed_dim=32, **two_sided(32, 32, batch_norm_latent=True)),
    "sdxl": lambda: AutoencoderKL(embed_dim=4, **two_sided(32, 4)),
    "wan 2.1": wan,
    "wan 2.2": wan_22,
    "ltx": lambda: lightricks.VideoVAE(config=LTX),
    "ltx, noise": lambda: lightricks.VideoVAE(config=LTX | {"timestep_conditioning": True}),
    "hunyuanvideo": hunyuan_video,
}
PATCHED = "patched"  # what ranks cannot take
H3, H3_LAYERS = "minimax h3", 36


def random_weights(module: torch.nn.Module, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """Values of order 1 for each weight; none for an encoder, which nobody runs. In its own dtype, or in `dtype`."""
    generator = torch.Generator().manual_seed(17)
    weights = {}
    for name, weight in module.state_dict().items():
        values = torch.zeros(weight.shape)
        if not name.startswith("encoder."):
            fan_in = max(1, weight[0].numel() if weight.ndim > 1 else 1)
            values = torch.randn(weight.shape, generator=generator) / fan_in**0.5
        if weight.ndim == 1 or "gamma" in name:  # norms and biases; variances are positive
            values = values.abs() * 0.2 + (0.0 if name.endswith("bias") else 0.8)
        weights[name] = values.to(dtype or weight.dtype)
    return weights


@contextmanager
def h3(**sizes: int) -> Iterator[Callable[[], torch.nn.Module]]:
    """MiniMax H3's, which meanwhile has a decoder of other sizes."""
    kind = importlib.import_module("comfy.ldm.minimax.vae")  # older ComfyUIs have none
    whole, kind.ViT3DDecoder = kind.ViT3DDecoder, partial(kind.ViT3DDecoder, **sizes)
    try:
        yield kind.MiniMaxH3VideoVAE
    finally:
        kind.ViT3DDecoder = whole


def large_h3() -> VAE:
    """MiniMax H3's at its real size, 2.6 billion weights in bf16. Here its 36 blocks are the same; a rank has 36."""
    with h3(num_layers=1) as made:
        weights = random_weights(made(), torch.bfloat16)
    first = "decoder.transformer_blocks.0."
    block = {name.removeprefix(first): each for name, each in weights.items() if name.startswith(first)}
    for number in range(1, H3_LAYERS):
        weights |= {first.replace("0", str(number)) + name: each for name, each in block.items()}
    pack = next(name for name in sys.modules if name.endswith(PACK)).removesuffix(PACK)
    with importlib.import_module(f"{pack}.parallel_runtime.models.hosted.vae").parameters_without_memory():
        vae = VAE(sd=weights, dtype=torch.bfloat16)
    vae.first_stage_model.load_state_dict(weights, assign=True)
    return vae


@node("SmallVAE", kind=[*MODULES, PATCHED], gives=[io.Vae])
def vae_of_a_kind(kind: str) -> io.NodeOutput:
    """A VAE that ComfyUI recognises by its weights, which are random."""
    vae = small_vae("wan 2.1" if kind == PATCHED else kind)
    if kind == PATCHED:
        vae.patcher.add_object_patch("conv2", vae.first_stage_model.conv2)
    return io.NodeOutput(vae)


def small_vae(kind: str, dtype: torch.dtype | None = None) -> VAE:
    """One of `MODULES`, in ComfyUI's choice of dtype or in `dtype`."""
    with torch.device("meta"):
        module = MODULES[kind]()
    config = getattr(module, "config", None)
    metadata = None if config is None else {"config": json.dumps({"vae": config})}
    return VAE(sd=random_weights(module, dtype), metadata=metadata, dtype=dtype)


@node("RandomLatent", gives=[io.Latent])
def random_latent(shape: str, seed: int = 3) -> io.NodeOutput:
    generator = torch.Generator().manual_seed(seed)
    return io.NodeOutput({"samples": torch.randn([int(size) for size in shape.split()], generator=generator)})


@node("CompareImages", shows=True)
def compare_images(image: io.Image, reference: io.Image) -> io.NodeOutput:
    """The largest difference of two pictures, by the second one's range, its shape, and how much of it is clamped."""
    same = image.shape == reference.shape
    error = float((image - reference).abs().max() / (reference.max() - reference.min())) if same else -1.0
    flat = float(((reference == 0) | (reference == 1)).float().mean())  # clamped: where nothing could differ
    found = {"error": error, "shape": list(image.shape), "clamped": flat}
    return io.NodeOutput(ui={"compared": [found]})


@node("TileHere", gives=[io.Image, io.Image], shows=True)
def tile_here(samples: io.Latent, vae: io.Vae = None) -> io.NodeOutput:
    """The pack's way through ComfyUI's tiled decode with every tile decoded in this process, and ComfyUI's own.

    For classes too large to be built in ranks: `minimax h3` has 1 of 36 blocks here, and 2 of 32 heads.
    """
    name = next(name for name in sys.modules if name.endswith(PACK))
    pack, latent = sys.modules[name], samples["samples"]
    vae = vae or small_h3()
    tiles = pack.tiles_of(vae, latent)
    method = getattr(vae.first_stage_model, pack.OWN_TILES if pack.tiles_by_itself(vae) else "decode")
    made = iter([method(tile.latent).to(tile.dtype) for tile in tiles])
    assert [tile.shape for tile in tiles] == [tuple(method(tile.latent).shape) for tile in tiles]
    image = pack.tiled(vae, latent, lambda _: next(made), output=torch.device("cpu"))
    (reference,) = comfy_nodes.VAEDecodeTiled().decode(vae, samples, 512, 64, 64, 8)
    sizes = [list(tile.latent.shape) for tile in tiles]
    return io.NodeOutput(image, reference, ui={"tiles": sizes})


def small_h3() -> VAE:
    """MiniMax H3's, as ComfyUI makes it, with a small network for its tiles."""
    with h3(num_layers=1, heads=2) as made:
        return VAE(sd=random_weights(made()))
