"""Flux.1, Flux.2, Chroma, HunyuanVideo and HunyuanImage: 35 tokens of image or 105 of video, 9 of text."""

from typing import Any

import torch
from torch import Tensor, nn

from .tiny import Case, at, build, case, noise, text_mask

FLUX = "comfy.ldm.flux.model.Flux"
SIZES = {"hidden_size": 96, "mlp_ratio": 2.0, "num_heads": 6, "depth": 2, "depth_single_blocks": 2, "qkv_bias": True}
FLUX_SIZES = SIZES | {"in_channels": 16, "out_channels": 16, "vec_in_dim": 32, "context_in_dim": 48, "patch_size": 2}
FLUX_SIZES |= {"axes_dim": [4, 6, 6], "theta": 10000, "guidance_embed": True, "txt_ids_dims": []}


def flux(**config: Any) -> nn.Module:
    """Flux.1."""
    return build(FLUX, **FLUX_SIZES | config)


def flux2(**more: Any) -> nn.Module:
    """Flux.2: global modulation, gated MLP."""
    config = {"vec_in_dim": None, "axes_dim": [4] * 4, "theta": 2000, "global_modulation": True, "mlp_silu_act": True}
    config |= {"qkv_bias": False, "ops_bias": False, "default_ref_method": "index", "ref_index_scale": 10.0}
    return flux(**config | {"txt_ids_dims": [3]} | more)


def inputs(batch: int = 2, height: int = 10, width: int = 14, text: int = 9, **more: Any) -> dict[str, Any]:
    """A call of Flux."""
    given = {"x": noise(batch, 16, height, width), "context": noise(batch, text, 48), "y": noise(batch, 32)}
    return given | {"timestep": at(*[0.7] * batch), "guidance": at(*[3.5] * batch)} | more


def residuals(count: int, tokens: int, width: int = 96) -> list[Tensor | None]:
    """A ControlNet's list."""
    return [noise(2, tokens, width) * (1 + at_block) for at_block in range(count)]


def mask(text: int = 9) -> Tensor:
    """Some text weighs less, for all; in the second image some of the image weighs less for some of it."""
    weights = torch.zeros(2, text + 35, text + 35)
    weights[:, :, min(3, text - 1) : 5] = -5.0
    weights[1, 12:30, 20:40] = -3.0
    return weights


case("Flux.1")(lambda: (flux(), inputs()))
case("Flux.1, 4 heads")(lambda: (flux(num_heads=4, axes_dim=[8, 8, 8]), inputs()))
case("Flux.1, 3 tokens of text and 3 of image")(lambda: (flux(), inputs(height=2, width=6, text=3)))
case("Flux.1, mask")(lambda: (flux(), inputs(attention_mask=mask())))
case("Flux.1, 1 token of text, mask")(lambda: (flux(), inputs(text=1, attention_mask=mask(1))))


@case("Flux.1, ControlNet")
def _() -> Case:
    control = {"input": [None, *residuals(1, 35)], "output": residuals(2, 20)}
    return flux(), inputs(control=control)


@case("Flux.1, ControlNet and mask")
def _() -> Case:
    control = {"input": residuals(2, 35), "output": residuals(2, 35)}
    return flux(), inputs(control=control, attention_mask=mask())


case("Flux.2")(lambda: (flux2(), inputs(ref_latents=[noise(2, 16, 6, 8)])))


@case("Flux.2, reference at timestep zero")
def _() -> Case:
    return flux2(), inputs(1, ref_latents=[noise(1, 16, 6, 8)], ref_latents_method="index_timestep_zero")


@case("Chroma")
def _() -> Case:
    config = FLUX_SIZES | {"in_channels": 64, "out_channels": 64, "vec_in_dim": None, "in_dim": 64, "hidden_dim": 48}
    config.pop("guidance_embed")
    model = build("comfy.ldm.chroma.model.Chroma", **config, n_layers=1, out_dim=96)
    given = inputs()
    given.pop("y")
    return model, given


@case("Chroma Radiance, mask, ControlNet")
def _() -> Case:
    config = FLUX_SIZES | {"in_channels": 3, "out_channels": 3, "vec_in_dim": None, "in_dim": 64, "hidden_dim": 48}
    config |= {"n_layers": 1, "out_dim": 96, "nerf_hidden_size": 16, "nerf_mlp_ratio": 2, "nerf_depth": 2}
    config |= {"nerf_max_freqs": 4, "nerf_tile_size": 16, "nerf_final_head_type": "conv", "nerf_embedder_dtype": None}
    config |= {"patch_size": 4, "use_x0": True, "use_sequential_txt_ids": True}
    config.pop("guidance_embed")
    control = {"input": [None, *residuals(1, 35)], "output": []}
    given = inputs(attention_mask=mask(), control=control) | {"x": noise(2, 3, 20, 28)}
    given.pop("y")
    return build("comfy.ldm.chroma_radiance.model.ChromaRadiance", **config), given


def hunyuan(**config: Any) -> nn.Module:
    """HunyuanVideo."""
    config = {"in_channels": 16, "out_channels": 16, "vec_in_dim": 32, "axes_dim": [4, 6, 6], "theta": 256} | config
    config = {"patch_size": [1, 2, 2], "guidance_embed": True, "vision_in_dim": None, "meanflow_sum": False} | config
    config = SIZES | {"byt5": False, "meanflow": False, "use_cond_type_embedding": False, "context_in_dim": 48} | config
    return build("comfy.ldm.hunyuan_video.model.HunyuanVideo", **config)


def video(**more: Any) -> dict[str, Any]:
    """A call of HunyuanVideo."""
    return {"x": noise(1, 16, 3, 10, 14), "timestep": at(700), "context": noise(1, 9, 48)} | more


@case("HunyuanVideo, text mask")
def _() -> Case:
    return hunyuan(), video(y=noise(1, 32), guidance=at(6), attention_mask=text_mask(1))


@case("HunyuanVideo i2v, token replaced")
def _() -> Case:
    return hunyuan(), video(y=noise(1, 32), guidance=at(6), guiding_frame_index=at(0))


@case("HunyuanVideo 1.5")
def _() -> Case:
    config = {"vec_in_dim": None, "vision_in_dim": 40, "guidance_embed": False, "depth_single_blocks": 0}
    config |= {"use_cond_type_embedding": True, "byt5": True}
    return hunyuan(**config), video(clip_fea=noise(1, 11, 40), txt_byt5=noise(1, 3, 1472))


@case("HunyuanImage 2.1")
def _() -> Case:
    given = {"x": noise(2, 16, 5, 7), "timestep": at(700, 700), "context": noise(2, 9, 48), "guidance": at(6, 6)}
    return hunyuan(patch_size=[1, 1], axes_dim=[8, 8], vec_in_dim=None), given


@case("HunyuanImage 2.1 refiner")
def _() -> Case:
    config = {"in_channels": 32, "patch_size": [1, 1, 1], "vec_in_dim": None, "meanflow": True, "byt5": True}
    given = {"x": noise(1, 32, 3, 5, 7), "timestep": at(700), "context": noise(1, 9, 48), "guidance": at(6)}
    return hunyuan(**config), given | {"txt_byt5": noise(1, 3, 1472), "disable_time_r": True}
