"""Qwen-Image, Z-Image and Lumina 2, OmniGen2, SD3.5, PixArt, HunyuanDiT, AuraFlow, HiDream: mostly 35 tokens."""

from typing import Any

import torch
from torch import nn

from .tiny import Case, at, build, case, noise, text_mask


def qwen(**config: Any) -> nn.Module:
    """Qwen-Image."""
    sizes = {"in_channels": 64, "out_channels": 16, "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 6}
    path = "comfy.ldm.qwen_image.model.QwenImageTransformer2DModel"
    return build(path, **sizes | {"joint_attention_dim": 48, "axes_dims_rope": (4, 6, 6)} | config)


def picture(batch: int = 2, **more: Any) -> dict[str, Any]:
    """A call of Qwen-Image."""
    return {"x": noise(batch, 16, 1, 10, 14), "timestep": at(*[0.7] * batch), "context": noise(batch, 9, 48)} | more


case("Qwen-Image, text mask")(lambda: (qwen(), picture(attention_mask=text_mask(2))))


@case("Qwen-Image, 1 token of text, text mask")
def _() -> Case:
    return qwen(), picture(context=noise(2, 1, 48), attention_mask=torch.tensor([[1], [0]]))


@case("Qwen-Image-Edit, two references")
def _() -> Case:
    return qwen(), picture(ref_latents=[noise(2, 16, 1, 6, 8), noise(2, 16, 1, 4, 6)])


@case("Qwen-Image-Edit, reference at timestep zero, ControlNet")
def _() -> Case:
    control = {"input": [noise(2, 35, 96), None]}
    return qwen(default_ref_method="index_timestep_zero"), picture(ref_latents=[noise(2, 16, 1, 6, 8)], control=control)


@case("Qwen-Image, 4 heads, two layers")
def _() -> Case:
    return qwen(num_attention_heads=4), picture(1) | {"x": noise(1, 16, 2, 10, 14)}


def lumina(**config: Any) -> nn.Module:
    """Lumina 2 and Z-Image."""
    sizes = {"patch_size": 2, "in_channels": 16, "dim": 96, "n_layers": 2, "n_refiner_layers": 2, "n_heads": 6}
    sizes |= {"n_kv_heads": 6, "qk_norm": True, "cap_feat_dim": 48, "axes_dims": [4, 6, 6], "axes_lens": [64] * 3}
    return build(
        "comfy.ldm.lumina.model.NextDiT",
        **sizes | {"rope_theta": 256.0, "ffn_dim_multiplier": 2.0, "multiple_of": 32} | config,
    )


Z_IMAGE = {"dim": 288, "axes_dims": [16] * 3, "z_image_modulation": True, "pad_tokens_multiple": 32}
Z_IMAGE |= {"time_scale": 1000.0}


def z_image() -> nn.Module:
    """Z-Image: wide enough for its modulation."""
    return lumina(**Z_IMAGE)


def described(batch: int = 2, **more: Any) -> dict[str, Any]:
    """A call of Lumina."""
    given = {"x": noise(batch, 16, 10, 14), "timesteps": at(*[0.7] * batch), "context": noise(batch, 9, 48)}
    return given | {"num_tokens": 9} | more


case("Z-Image")(lambda: (z_image(), described()))


@case("Z-Image Omni, reference and what vision sees")
def _() -> Case:
    model = lumina(**Z_IMAGE, siglip_feat_dim=40)
    texts = [noise(1, 5, 48), noise(1, 4, 48)]
    given = described(1, ref_latents=[noise(1, 16, 6, 8)], ref_contexts=texts)
    return model, given | {"siglip_feats": [noise(1, 3, 5, 40)]}


MING = ("comfy.ldm.lumina.model", "ref_frames")


case("Ming-Image, 3 layers", of=MING)(lambda: (z_image(), described(1, x=noise(1, 16, 3, 10, 14))))


@case("Ming-Image, two references of other sizes", of=MING)
def _() -> Case:
    frames = [noise(1, 16, 6, 8), noise(1, 16, 10, 14) * 0.5]
    return lumina(**Z_IMAGE, image_model="ming_image"), described(1, x=noise(1, 16, 1, 10, 14), ref_frames=frames)


case("Lumina 2, 2 groups of heads")(lambda: (lumina(n_kv_heads=2), described()))


@case("OmniGen2, reference")
def _() -> Case:
    sizes = {"patch_size": 2, "in_channels": 16, "hidden_size": 96, "num_layers": 2, "num_refiner_layers": 1}
    sizes |= {"num_attention_heads": 8, "num_kv_heads": 4, "multiple_of": 32, "axes_dim_rope": (4, 4, 4)}
    model = build("comfy.ldm.omnigen.omnigen2.OmniGen2Transformer2DModel", **sizes, text_feat_dim=48)
    return model, described(1, ref_latents=[noise(1, 16, 6, 8)])


def sd3(twice: list[int], **more: Any) -> Case:
    """SD3.5. `twice`: blocks in which the image attends to itself as well."""
    embedder = {"target": "torch.nn.Linear", "params": {"in_features": 48, "out_features": 384}}
    model = build(
        "comfy.ldm.modules.diffusionmodules.mmdit.OpenAISignatureMMDITWrapper",
        input_size=None,
        patch_size=2,
        in_channels=16,
        depth=6,
        num_blocks=3,
        mlp_ratio=2.0,
        adm_in_channels=32,
        context_embedder_config=embedder,
        pos_embed_max_size=16,
        num_patches=256,
        qk_norm="rms",
        x_block_self_attn_layers=twice,
    )
    given = {"x": noise(2, 16, 10, 14), "timesteps": at(0.7, 0.7), "context": noise(2, 9, 48), "y": noise(2, 32)}
    return model, given | more


case("SD3.5 medium, ControlNet")(lambda: sd3([0, 1], control={"output": [noise(2, 35, 384), None, noise(2, 35, 384)]}))
case("SD3.5 large")(lambda: sd3([]))


@case("PixArt alpha")
def _() -> Case:
    sizes = {"hidden_size": 96, "depth": 2, "num_heads": 6, "mlp_ratio": 2.0, "caption_channels": 48}
    model = build(
        "comfy.ldm.pixart.pixartms.PixArtMS", **sizes, model_max_length=9, pe_interpolation=1, micro_condition=True
    )
    given = {"x": noise(2, 4, 30, 38), "timesteps": at(300, 300), "context": noise(2, 9, 48)}
    return model, given | {"c_size": noise(2, 2).abs() * 100, "c_ar": noise(2, 1).abs()}


@case("HunyuanDiT, long skips")
def _() -> Case:
    sizes = {"hidden_size": 96, "depth": 6, "num_heads": 6, "mlp_ratio": 2.0, "text_states_dim": 64, "input_size": 32}
    sizes |= {"text_states_dim_t5": 48, "text_len": 7, "text_len_t5": 8, "size_cond": True, "use_style_cond": True}
    given = {"x": noise(2, 4, 10, 14), "t": at(300, 300), "context": noise(2, 7, 64), "transformer_options": {}}
    given |= {"encoder_hidden_states_t5": noise(2, 8, 48), "text_embedding_mask_t5": torch.ones(2, 8)}
    given |= {"text_embedding_mask": torch.ones(2, 7), "image_meta_size": noise(2, 6).abs() * 100}
    return build("comfy.ldm.hydit.models.HunYuanDiT", **sizes), given


@case("AuraFlow")
def _() -> Case:
    sizes = {"dim": 96, "n_layers": 4, "n_double_layers": 2, "n_heads": 6, "global_conddim": 96, "cond_seq_dim": 48}
    given = {"x": noise(2, 4, 10, 14), "timestep": at(0.7, 0.7), "context": noise(2, 9, 48)}
    model = build("comfy.ldm.aura.mmdit.MMDiT", **sizes, max_seq=256)
    for name, weight in model.named_parameters():
        if ".mod" in name:
            weight.mul_(8)  # what makes the gates has no bias
    return model, given


@case("HiDream-I1, experts")
def _() -> Case:
    sizes = {"patch_size": 2, "in_channels": 16, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16}
    sizes |= {"num_attention_heads": 6, "caption_channels": [48, 40], "text_emb_dim": 32, "axes_dims_rope": (4, 6, 6)}
    path = "comfy.ldm.hidream.model.HiDreamImageTransformer2DModel"
    given = {"x": noise(2, 16, 10, 14), "t": at(300, 300), "y": noise(2, 32), "context": noise(2, 9, 48)}
    given |= {"encoder_hidden_states_llama3": noise(2, 3, 11, 40)}
    return build(path, **sizes, max_resolution=(64, 64), llama_layers=[0, 1, 2, 2]), given


def hidream_o1(groups: int = 2, **references: Any) -> Case:
    """HiDream-O1: its prompt of 9 tokens, the last of which is the timestep's, and 35 patches of 32 x 32 pixels."""
    from comfy.ldm.hidream_o1.conditioning import build_extra_conds
    from comfy.ldm.hidream_o1.model import TMS_TOKEN_ID

    text = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 3 * groups}
    text |= {"num_key_value_heads": groups, "head_dim": 16, "rope_dims": [4, 2, 2]}
    vision = {"hidden_size": 48, "num_heads": 4, "intermediate_size": 96, "depth": 1, "num_position_embeddings": 16}
    path = "comfy.ldm.hidream_o1.model.HiDreamO1Transformer"
    model = build(path, text_config_overrides=text, vision_config_overrides=vision)
    model.language_model.embed_tokens.weight.mul_(10)
    given = {"x": noise(1, 3, 160, 224), "timesteps": at(700), "context": None}
    prompt = torch.tensor([[5, 77, 3, 1000, 9, 600, 42, 8, TMS_TOKEN_ID]])
    return model, given | build_extra_conds(prompt, given["x"], **references)


case("HiDream-O1")(lambda: hidream_o1(groups=4))


@case("HiDream-O1, two references")
def _() -> Case:
    return hidream_o1(ref_images=[noise(1, 96, 128, 3).sigmoid(), noise(1, 128, 64, 3).sigmoid()])


def krea2() -> nn.Module:
    """Krea 2: 6 heads in 2 groups, texts of 3 layers."""
    sizes = {"features": 96, "tdim": 32, "txtdim": 48, "heads": 6, "kvheads": 2, "multiplier": 2, "layers": 2}
    sizes |= {"channels": 16, "txtlayers": 3, "txtheads": 6, "txtkvheads": 6}
    return build("comfy.ldm.krea2.model.SingleStreamDiT", **sizes)


def layered(batch: int = 2, **more: Any) -> dict[str, Any]:
    """A call of Krea 2."""
    given = {"x": noise(batch, 16, 10, 14), "timesteps": at(*[0.7] * batch), "context": noise(batch, 9, 3 * 48)}
    return given | {"transformer_options": {}} | more


case("Krea 2")(lambda: (krea2(), layered()))


@case("Krea 2, reference at timestep zero")
def _() -> Case:
    return krea2(), layered(ref_latents=[noise(2, 16, 6, 8)], ref_latents_method="index_timestep_zero")
