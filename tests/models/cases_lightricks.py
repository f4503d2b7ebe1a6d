"""LTX-Video, LTX-2 and LTX-2.5: frames of 5 x 7 latents, 35 tokens each; 13 tokens of audio."""

from typing import Any

import torch
from torch import Tensor, nn

from .tiny import Case, at, build, case, noise, text_mask

SIZES = {"in_channels": 16, "cross_attention_dim": 96, "attention_head_dim": 16, "num_attention_heads": 6}
SIZES |= {"caption_channels": 48, "num_layers": 2, "positional_embedding_max_pos": [20, 64, 64]}


def ltxv(**config: Any) -> nn.Module:
    """LTX-Video."""
    return build("comfy.ldm.lightricks.model.LTXVModel", **SIZES | config)


def ltx2(**config: Any) -> nn.Module:
    """LTX-2."""
    more = {"audio_in_channels": 128, "audio_cross_attention_dim": 48, "audio_attention_head_dim": 8}
    more |= {"audio_num_attention_heads": 6, "connector_num_layers": 1, "connector_attention_head_dim": 8}
    return build(
        "comfy.ldm.lightricks.av_model.LTXAVModel", **SIZES | more | {"connector_num_attention_heads": 6} | config
    )


def guides(frames: int, strength: float) -> dict[str, Any]:
    """The last of `frames` frames is a guide of this strength."""
    where = torch.full((1, 3, 35, 2), 2.0)
    where[:, 1:] += torch.arange(35)[None, None, :, None]
    entry = {"pre_filter_count": 35, "strength": strength, "pixel_mask": None, "latent_shape": (1, 5, 7)}
    given = {"keyframe_idxs": where, "denoise_mask": torch.ones(1, 1, frames, 5, 7)}
    return given | {"guide_attention_entries": [entry]}


@case("LTX-Video")
def _() -> Case:
    given = {"x": noise(2, 16, 3, 5, 7), "timestep": at(0.7, 0.7), "context": noise(2, 9, 48), "attention_mask": None}
    return ltxv(), given


@case("LTX-Video, a timestep for each token, text mask")
def _() -> Case:
    given = {"x": noise(1, 16, 3, 5, 7), "timestep": noise(1, 105).sigmoid(), "context": noise(1, 9, 48)}
    return ltxv(), given | {"attention_mask": text_mask(1)}


@case("LTX-Video, guide at half strength")
def _() -> Case:
    given = {"x": noise(1, 16, 4, 5, 7), "timestep": noise(1, 140).sigmoid(), "context": noise(1, 9, 48)}
    return ltxv(), given | {"attention_mask": None} | guides(4, 0.5)


def av(video_timestep: Tensor, **more: Any) -> dict[str, Any]:
    """A call of LTX-2."""
    timesteps = [video_timestep, noise(1, 13).sigmoid()]
    given = {"x": [noise(1, 16, 3, 5, 7), noise(1, 8, 13, 16)], "timestep": timesteps, "context": noise(1, 9, 96)}
    return given | {"attention_mask": None} | more


case("LTX-2, a timestep for each frame")(lambda: (ltx2(), av(at(0.1, 0.7, 0.6)[None].repeat_interleave(35, 1))))


@case("LTX-2, gates, adaptive text")
def _() -> Case:
    return ltx2(apply_gated_attention=True, cross_attention_adaln=True), av(at(0.7)[None].repeat(1, 105))


@case("LTX-2, a timestep for each token")
def _() -> Case:
    spatial = torch.ones(1, 1, 3, 5, 7)
    spatial[..., :2, :] = 0.5
    return ltx2(), av(noise(1, 105).sigmoid(), denoise_mask=spatial)


@case("LTX-2, reference audio")
def _() -> Case:
    return ltx2(), av(at(0.7)[None].repeat(1, 105), ref_audio={"tokens": noise(1, 5, 128)})


@case("LTX-2, 1 token of audio")
def _() -> Case:
    given = av(at(0.7)[None].repeat(1, 105))
    sound = {"x": [given["x"][0], noise(1, 8, 1, 16)], "timestep": [given["timestep"][0], noise(1, 1).sigmoid()]}
    return ltx2(), given | sound


@case("LTX-2, no audio")
def _() -> Case:
    given = av(at(0.7)[None].repeat(1, 105))
    return ltx2(), given | {"x": given["x"][:1], "timestep": at(0.7)}


@case("LTX-2, guide at half strength")
def _() -> Case:
    given = av(noise(1, 140).sigmoid())
    return ltx2(), given | {"x": [noise(1, 16, 4, 5, 7), given["x"][1]]} | guides(4, 0.5)


LTX25 = ("comfy.ldm.lightricks.av_model", "use_prompt_adaln_single")
SIZES_25 = {"ff_bias": False, "audio_ff_bias": False, "use_prompt_adaln_single": False}


def ltx25() -> nn.Module:
    """LTX-2.5: LTX-2's class, without biases and without a modulation of the text."""
    return ltx2(apply_gated_attention=True, **SIZES_25)


case("LTX-2.5", of=LTX25)(lambda: (ltx25(), av(at(0.1, 0.7, 0.6)[None].repeat_interleave(35, 1))))


@case("LTX-2.5, guide at half strength, no self attention in a block", of=LTX25)
def _() -> Case:
    given = av(noise(1, 140).sigmoid()) | {"transformer_options": {"stg_self_attn_blocks": [1]}}
    return ltx25(), given | {"x": [noise(1, 16, 4, 5, 7), given["x"][1]]} | guides(4, 0.5)
