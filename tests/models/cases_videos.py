"""MiniMax H3, Mochi, Kandinsky 5, Cosmos 1 and Predict2 (Anima), CogVideoX: mostly 105 tokens."""

from typing import Any

import torch
from torch import nn

from .tiny import Case, at, build, case, noise

VIDEO = (3, 10, 14)


def h3(num_layers: int = 2) -> nn.Module:
    """MiniMax H3."""
    sizes = {"hidden_size": 96, "num_layers": num_layers, "token_refiner_num_layers": 1, "num_attention_heads": 6}
    sizes |= {"attention_head_dim": 16, "ffn_hidden_size": 128, "text_dim": 40, "time_embed_hidden_size": 64}
    model = build("comfy.ldm.minimax.model.MiniMaxH3Model", **sizes, time_embed_dim=32, rope_inv_freq_len=2)
    model.rope.inv_freq.copy_(at(1.0, 0.1))
    return model


def clip(**payload: Any) -> dict[str, Any]:
    """A call of MiniMax H3: video and audio."""
    given = {"x": [noise(1, 24, *VIDEO), noise(1, 32, 2, 5)], "timestep": at(700), "context": noise(1, 9, 40)}
    return given | ({"minimax_payload": payload} if payload else {})


case("MiniMax H3")(lambda: (h3(), clip()))


@case("MiniMax H3, first and last keyframe")
def _() -> Case:
    latents = [noise(1, 24, 1, 10, 14), noise(1, 24, 1, 10, 14) * 0.5]
    frames = [{"resolved_frame_index": at, "latent": each} for at, each in zip((0, 8), latents, strict=True)]
    return h3(), clip(keyframes=frames, cond_video_latents=latents, frame_count=9)


@case("MiniMax H3, keyframes anywhere, with sound", of=("comfy.ldm.minimax.model", '"audio_latent"'))
def _() -> Case:
    latents, sound = [noise(1, 24, 1, 10, 14), noise(1, 24, 2, 10, 14) * 0.5], noise(1, 32, 2, 3)
    frames = [{"resolved_frame_index": 3, "latent": latents[0], "audio_latent": sound}]
    frames += [{"resolved_frame_index": 5, "latent": latents[1]}]
    return h3(), clip(keyframes=frames, cond_video_latents=latents, cond_audio_latents=[sound])


@case("MiniMax H3, references, tagged text")
def _() -> Case:
    image = {"kind": "image", "latent_h": 6, "latent_w": 8}
    audio = {"kind": "audio", "ref_audio_t": 3}
    video = {"kind": "video_audio", "latent_t": 2, "latent_h": 4, "latent_w": 6, "ref_audio_t": 2}
    payload = {"refs": [image, audio, video], "text_token_tags": torch.tensor([1, 1, 0, 0, 0, 1, 1, 1, 1])}
    payload |= {"cond_video_latents": [noise(1, 24, 1, 6, 8), noise(1, 24, 2, 4, 6)]}
    return h3(), clip(**payload, cond_audio_latents=[noise(1, 32, 2, 3), noise(1, 32, 2, 2)])


@case("MiniMax H3, parts of video and sound are kept", of=("comfy.ldm.minimax.model", "audio_denoise_mask"))
def _() -> Case:
    masks = {"denoise_mask": noise(1, 1, *VIDEO).sigmoid(), "audio_denoise_mask": noise(1, 1, 2, 5).sigmoid()}
    return h3(), clip() | masks


def mochi(text: int, cropped: int) -> Case:
    """Mochi, of whose tokens of text so many count."""
    sizes = {"depth": 2, "patch_size": 2, "num_heads": 6, "hidden_size_x": 96, "hidden_size_y": 48, "in_channels": 12}
    sizes |= {"mlp_ratio_x": 128.0, "mlp_ratio_y": 2.0, "qk_norm": True, "qkv_bias": False, "learn_sigma": False}
    sizes |= {"use_t5": True, "t5_feat_dim": 48, "t5_token_length": 9, "timestep_scale": 1000.0}
    given = {"x": noise(1, 12, *VIDEO), "timestep": at(0.7), "context": noise(1, text, 48), "num_tokens": cropped}
    given |= {"attention_mask": torch.ones(1, text, dtype=torch.bool)}
    return build("comfy.ldm.genmo.joint_model.asymm_models_joint.AsymmDiTJoint", **sizes), given


case("Mochi, cropped text")(lambda: mochi(9, 6))
case("Mochi, 1 token of text")(lambda: mochi(1, 1))


@case("Kandinsky 5")
def _() -> Case:
    sizes = {"in_visual_dim": 16, "out_visual_dim": 16, "in_text_dim": 48, "in_text_dim2": 32, "time_dim": 64}
    sizes |= {"model_dim": 96, "ff_dim": 192, "visual_embed_dim": 132, "num_text_blocks": 1, "num_visual_blocks": 2}
    given = {"x": noise(1, 33, *VIDEO), "timestep": at(0.7), "context": noise(1, 9, 48), "y": noise(1, 32)}
    return build("comfy.ldm.kandinsky5.model.Kandinsky5", **sizes, axes_dims=(4, 6, 6)), given


COSMOS = {"max_img_h": 32, "max_img_w": 32, "max_frames": 8, "in_channels": 16, "out_channels": 16, "num_heads": 6}
COSMOS |= {"patch_spatial": 2, "patch_temporal": 1, "model_channels": 96, "num_blocks": 2, "mlp_ratio": 2.0}
COSMOS |= {"crossattn_emb_channels": 48, "pos_emb_cls": "rope3d", "use_adaln_lora": True, "adaln_lora_dim": 16}
PREDICT2 = "comfy.ldm.cosmos.predict2.MiniTrainDIT"


@case("Cosmos Predict2, a timestep for each frame")
def _() -> Case:
    given = {"x": noise(1, 16, *VIDEO), "timesteps": at(0, 700, 650)[None], "context": noise(1, 9, 48)}
    return build(PREDICT2, **COSMOS, extra_per_block_abs_pos_emb=True), given


@case("Cosmos Predict2, an upright image (Anima)")
def _() -> Case:
    given = {"x": noise(2, 16, 1, 14, 10), "timesteps": at(0.7, 0.7), "context": noise(2, 9, 48)}
    return build(PREDICT2, **COSMOS, extra_per_block_abs_pos_emb=False), given


@case("Cosmos 1")
def _() -> Case:
    more = {"block_config": "FA-CA-MLP", "block_x_format": "THWBD", "affline_emb_norm": True}
    more |= {"extra_per_block_abs_pos_emb": True, "extra_per_block_abs_pos_emb_type": "learnable"}
    given = {"x": noise(1, 16, *VIDEO), "timesteps": at(700), "context": noise(1, 9, 48)}
    return build("comfy.ldm.cosmos.model.GeneralDIT", **COSMOS, **more), given


def cog(**more: Any) -> nn.Module:
    """CogVideoX."""
    sizes = {"num_attention_heads": 6, "attention_head_dim": 16, "in_channels": 16, "out_channels": 16}
    sizes |= {"time_embed_dim": 64, "text_embed_dim": 48, "num_layers": 2, "sample_width": 16, "sample_height": 16}
    sizes |= {"sample_frames": 9, "max_text_seq_length": 9, "use_rotary_positional_embeddings": True}
    return build("comfy.ldm.cogvideo.model.CogVideoXTransformer3DModel", **sizes | more)


COG = {"x": noise(1, 16, *VIDEO), "timestep": at(700), "context": noise(1, 9, 48)}
case("CogVideoX 1.5")(lambda: (cog(patch_size_t=1), {**COG}))
case("CogVideoX 2B, positions that are added")(lambda: (cog(use_rotary_positional_embeddings=False), {**COG}))


@case("CogVideoX 1.5 i2v, two frames a token")
def _() -> Case:
    given = {"x": noise(2, 32, 4, 10, 14), "timestep": at(700, 700), "context": noise(2, 9, 48), "ofs": at(2, 2)}
    return cog(in_channels=32, ofs_embed_dim=64, patch_size_t=2), given
