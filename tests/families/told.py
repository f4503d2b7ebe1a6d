"""Families whose sizes ComfyUI's detection fixes: Ernie-Image (8 billion weights), HiDream-O1, PixelDiT and others.

Their files are tiny; the test host tells ComfyUI's detection the sizes (host/told_sizes.py). Hunyuan3D and CogVideoX
need no such help: the one has 16 heads of any width, the other any number of heads of 64. Files in bf16 are those of
classes that read the dtype of a weight.
"""

from typing import Any

import torch

from host.client import Workflow

from .files import ModelFile, Rule, tiny
from .graphs import (
    HEIGHT,
    VIDEO_AND_AUDIO,
    WIDTH,
    encoder,
    node,
    picture,
    picture_of,
    prompts,
    separate,
    through,
    with_references,
)
from .variant import variants

HEADS = {"num_attention_heads": 5}  # of 16, which 2 and 3 ranks share unevenly
AXES, TEXT = [4, 6, 6], 48
BY_FLUX = {"in_channels": 128, "out_channels": 128}  # latents of Flux.2's VAE
ERNIE = HEADS | BY_FLUX | {"hidden_size": 80, "num_layers": 2, "ffn_hidden_size": 128, "text_in_dim": TEXT}
ERNIE |= {"rope_axes_dim": AXES}
BOOGU = {"hidden_size": 96, "num_layers": 2, "num_double_stream_layers": 2, "num_refiner_layers": 1, "multiple_of": 32}
BOOGU |= {"num_attention_heads": 6, "num_kv_heads": 2, "axes_dim_rope": AXES, "instruction_feat_dim": TEXT}
MAGE_TEXT = 2560  # by which the detection knows it
MAGE = HEADS | BY_FLUX | {"num_layers": 2, "attention_head_dim": 16, "axes_dims_rope": AXES}
PIXELS = {"num_groups": 5, "hidden_size": 80, "pixel_hidden_size": 8, "pixel_num_groups": 3, "patch_depth": 4}
PIXELS |= {"pixel_attn_hidden_size": 48, "pixel_depth": 2, "patch_size": 4, "txt_embed_dim": TEXT, "txt_max_length": 11}
PID = PIXELS | {"lq_latent_channels": 16, "lq_hidden_dim": 32, "lq_num_res_blocks": 1, "lq_interval": 2}
PID |= {"pit_lq_inject": True}
Z_PIXEL = {"image_model": "zimage_pixel", "patch_size": 2, "in_channels": 3, "n_layers": 2, "n_refiner_layers": 2}
Z_PIXEL |= {"dim": 288, "n_heads": 6, "n_kv_heads": 6, "qk_norm": True, "cap_feat_dim": TEXT, "axes_dims": [16] * 3}
Z_PIXEL |= {"axes_lens": [64] * 3, "rope_theta": 256.0, "multiple_of": 32, "ffn_dim_multiplier": 2.0}
Z_PIXEL |= {"z_image_modulation": True, "time_scale": 1000.0, "pad_tokens_multiple": 32, "decoder_hidden_size": 64}
Z_PIXEL |= {"decoder_num_res_blocks": 2, "decoder_in_channels": 12, "decoder_max_freqs": 8}
RADIANCE = {"in_channels": 3, "out_channels": 3, "hidden_size": 80, "num_heads": 5, "mlp_ratio": 2.0, "depth": 2}
RADIANCE |= {"depth_single_blocks": 2, "qkv_bias": True, "context_in_dim": TEXT, "patch_size": 4, "axes_dim": AXES}
RADIANCE |= {"theta": 10000, "in_dim": 64, "hidden_dim": 48, "n_layers": 1, "out_dim": 80, "nerf_hidden_size": 16}
RADIANCE |= {"nerf_mlp_ratio": 2, "nerf_depth": 2, "nerf_max_freqs": 4, "nerf_tile_size": 16}
RADIANCE |= {"nerf_final_head_type": "conv", "use_x0": True, "use_sequential_txt_ids": False, "vec_in_dim": None}
RADIANCE |= {"txt_ids_dims": []}
O1_TEXT = {"hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 3, "num_attention_heads": 6}
O1_TEXT |= {"num_key_value_heads": 2, "head_dim": 16, "rope_dims": [4, 2, 2]}
O1_VISION = {"hidden_size": 48, "num_heads": 4, "intermediate_size": 96, "depth": 1, "num_position_embeddings": 16}
SPLAT_TOKENS, SPLAT_CAMERA = 35, 5
SPLAT = {"q_token_length": SPLAT_TOKENS, "model_channels": 80, "cond_channels": TEXT, "num_blocks": 2, "mlp_ratio": 2}
SPLAT |= {"num_head_channels": 16, "num_refiner_blocks": 2}
SHAPE = {"hidden_size": 256, "num_heads": 16}  # Hunyuan3D
SHAPE_2 = SHAPE | {"context_in_dim": TEXT, "depth": 2, "depth_single_blocks": 2, "guidance_embed": True}
COG = {"num_attention_heads": 5, "num_layers": 2, "time_embed_dim": 64, "text_embed_dim": TEXT, "patch_size_t": 2}
COG |= {"in_channels": 16, "out_channels": 16, "use_rotary_positional_embeddings": True, "ofs_embed_dim": 64}
ANIMA = {"model_channels": 80, "num_heads": 5, "num_blocks": 2, "crossattn_emb_channels": 1024, "adaln_lora_dim": 16}
ANIMA |= {"max_img_h": 240, "max_img_w": 240, "max_frames": 128, "in_channels": 16, "out_channels": 16}
ANIMA |= {"patch_spatial": 2, "patch_temporal": 1, "pos_emb_cls": "rope3d", "use_adaln_lora": True}
ANIMA |= {"extra_per_block_abs_pos_emb": False}
SHAPE_21 = SHAPE | {"context_dim": 1024, "depth": 7, "guidance_cond_proj_dim": None}  # 6 with experts, long skips


def told(name: str, path: str, seed: int, sizes: dict[str, Any], **more: Any) -> ModelFile:
    """A file whose metadata tell all of its sizes."""
    said = tuple(name for name in sizes if name != "nerf_embedder_dtype")
    return tiny(name, path, seed, sizes, told=said, told_by_test_host=True, **more)


FILES = (
    told("ernie", "ernie.model.ErnieImageModel", 101, ERNIE),
    told("boogu", "boogu.model.BooguTransformer2DModel", 102, BOOGU),
    told("mage_flow", "mage_flow.model.MageFlowTransformer2DModel", 103, MAGE),
    told("pixeldit", "pixeldit.model.PixDiT_T2I", 104, PIXELS, prefix="core."),
    told("pid", "pixeldit.pid.PidNet", 105, PID),
    told("z_image_pixel", "lumina.model.NextDiTPixelSpace", 106, Z_PIXEL, dtype=torch.bfloat16),
    told("chroma_radiance", "chroma_radiance.model.ChromaRadiance", 107, RADIANCE | {"nerf_embedder_dtype": None}),
    told(
        "hidream_o1",
        "hidream_o1.model.HiDreamO1Transformer",
        108,
        {"text_config_overrides": O1_TEXT, "vision_config_overrides": O1_VISION},
        rules=(Rule(r"embed_tokens\.weight$", std=1.0),),
        dtype=torch.bfloat16,  # most of it are embeddings of 151,936 tokens
        only_when_full=True,
    ),
    told("triposplat", "triposplat.model.LatentSeqMMFlowModel", 109, SPLAT, dtype=torch.bfloat16),
    told("anima", "anima.model.Anima", 113, ANIMA, dtype=torch.bfloat16),  # 260 MB: its adapter of the text is whole
    tiny("hunyuan3d_2", "hunyuan3d.model.Hunyuan3Dv2", 110, SHAPE_2),
    tiny("hunyuan3d_2_1", "hunyuan3dv2_1.hunyuandit.HunYuanDiTPlain", 111, SHAPE_21, dtype=torch.bfloat16),
    tiny("cogvideox", "cogvideo.model.CogVideoXTransformer3DModel", 112, COG, dtype=torch.bfloat16),
)


RADIANCE_LATENT = "EmptyChromaRadianceLatentImage"  # pixels
ernie = picture_of(TEXT, "EmptyFlux2LatentImage")
boogu = picture_of(TEXT, masked=0)  # stock stands no padding here
mage_flow = picture_of(MAGE_TEXT, "EmptyFlux2LatentImage", masked=2)
pixeldit = picture_of(TEXT, RADIANCE_LATENT, width=27, height=19)  # which patches of 4 do not divide
z_pixel = picture_of(TEXT, RADIANCE_LATENT, width=26, height=22, masked=2)
radiance = picture_of(TEXT, RADIANCE_LATENT, width=28, height=20)


def boogu_edit(graph: Workflow) -> None:
    boogu(graph)
    encoder(graph, temporal=0)
    with_references(graph, (96, 64), (64, 48))


def mage_flow_edit(graph: Workflow) -> None:
    mage_flow(graph)
    encoder(graph, channels=128, spatial=16, temporal=0)
    with_references(graph, (64, 48))


def pid(graph: Workflow) -> None:
    """A latent of 4 x 3 that is made a picture; sides that patches do not divide."""
    pixeldit(graph)
    vae, pixels = encoder(graph, temporal=0), picture(graph, "picture", width=32, height=24)
    graph["low"] = node("VAEEncode", pixels=pixels, vae=vae)
    for name in ("positive", "negative"):
        inputs = {"positive": [name, 0], "latent": ["low", 0], "latent_format": "flux", "degrade_sigma": 0.1}
        through(graph, f"low {name}", "PiDConditioning", name, **inputs)


def cogvideox(graph: Workflow) -> None:
    """105 tokens of two frames each; prompts of unequal length."""
    prompts(graph, width=TEXT, tokens=11, negative_tokens=7)
    size = {"width": WIDTH, "height": HEIGHT, "length": 21, "batch_size": 1}
    through(graph, "latent", "EmptyHunyuanLatentVideo", "latent_image", **size)


def hidream_o1(graph: Workflow) -> None:
    """35 patches of 32 x 32 pixels; the prompts' tokens go through the model."""
    for name, prompt in (("positive", "a harbour in the rain"), ("negative", "blurred")):
        graph[name] = node("HiDreamO1Prompt", prompt=prompt)
    size = {"width": 224, "height": 160, "batch_size": 1}
    through(graph, "latent", "EmptyHiDreamO1LatentImage", "latent_image", **size)


def hidream_o1_edit(graph: Workflow) -> None:
    hidream_o1(graph)
    pixels = picture(graph, "picture", width=128, height=96)
    inputs = {"positive": ["positive", 0], "negative": ["negative", 0], "images.image_1": pixels}
    through(graph, "references", "HiDreamO1ReferenceImages", "positive", "negative", **inputs)


def triposplat(graph: Workflow) -> None:
    """35 tokens of splats and one of the camera; 11 tokens of the picture and its latent of 3 x 2."""
    prompts(graph, width=TEXT, tokens=11)
    encoder(graph, channels=128, spatial=16, temporal=0)
    with_references(graph, (48, 32))
    inputs = {"tokens": SPLAT_TOKENS, "channels": 16, "camera": SPLAT_CAMERA}
    through(graph, "latent", "EmptySplatLatent", "latent_image", **inputs)
    separate(graph)


def anima(graph: Workflow) -> None:
    """35 tokens of picture; a text of 11 tokens that the model's adapter reads with 9 tokens of T5's, and 7 with 6."""
    picture_of(1024)(graph)
    for name, tokens in (("positive", 9), ("negative", 6)):
        through(graph, f"{name} t5", "TextOfTokens", name, conditioning=[name, 0], tokens=tokens, seed=len(name))


def shape(text: int) -> Any:
    """35 tokens of a shape, 11 and 7 of pictures."""

    def add(graph: Workflow) -> None:
        prompts(graph, width=text, tokens=11, negative_tokens=7)
        through(graph, "latent", "EmptyLatentHunyuan3Dv2", "latent_image", resolution=35, batch_size=1)

    return add


VARIANTS = variants(
    ("ernie-image", "Ernie-Image", "ernie", ernie),
    ("boogu", "Boogu", "boogu", boogu),
    ("boogu edit", "Boogu", "boogu", boogu_edit),
    ("mage-flow", "Mage-Flow", "mage_flow", mage_flow),
    ("mage-flow edit", "Mage-Flow", "mage_flow", mage_flow_edit),
    ("pixeldit", "PixelDiT", "pixeldit", pixeldit),
    ("pid", "PiD", "pid", pid),
    ("z-image in pixels", "Z-Image in pixels", "z_image_pixel", z_pixel),
    ("anima", "Anima", "anima", anima),
    ("chroma radiance", "Chroma Radiance", "chroma_radiance", radiance),
    ("hidream-o1", "HiDream-O1", "hidream_o1", hidream_o1),
    ("hidream-o1 edit", "HiDream-O1", "hidream_o1", hidream_o1_edit),
)
SHAPES = (("hunyuan3d 2", "hunyuan3d_2", shape(TEXT)), ("hunyuan3d 2.1", "hunyuan3d_2_1", shape(1024)))
VARIANTS += variants(("cogvideox", "CogVideoX", "cogvideox", cogvideox), previews=False)
VARIANTS += variants(("triposplat", "TripoSplat", "triposplat", triposplat), latents=VIDEO_AND_AUDIO, previews=False)
VARIANTS += variants(*((name, "Hunyuan3D", file, add) for name, file, add in SHAPES), previews=False)
