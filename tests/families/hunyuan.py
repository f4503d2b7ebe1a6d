"""HunyuanVideo with 5 heads: from a text with padding, with a first frame as tokens of timestep zero, and 1.5."""

from host.client import Workflow

from .files import tiny
from .graphs import HEIGHT, LENGTH, WIDTH, encoder, node, picture, prompts, second_text, through
from .variant import variants

FAMILY = "HunyuanVideo"
TEXT, POOLED = 48, 768  # the pooled text's width is fixed by ComfyUI's detection, as are heads of 128
SIZES = {"in_channels": 16, "out_channels": 16, "vec_in_dim": POOLED, "context_in_dim": TEXT, "hidden_size": 640}
SIZES |= {"mlp_ratio": 4.0, "num_heads": 5, "depth": 1, "depth_single_blocks": 2, "axes_dim": [16, 56, 56]}
SIZES |= {"theta": 256, "patch_size": [1, 2, 2], "qkv_bias": True, "guidance_embed": True, "byt5": False}
SIZES |= {"meanflow": False, "use_cond_type_embedding": False, "vision_in_dim": None, "meanflow_sum": False}
# 1.5 has no pooled text, guidance and single blocks; its latents have 32 channels, beside them a picture's and a mask.
VISION, GLYPHS = 1152, 1472
SIZES_15 = SIZES | {"in_channels": 65, "out_channels": 32, "patch_size": [1, 1, 1], "vec_in_dim": None, "byt5": True}
SIZES_15 |= {"hidden_size": 384, "num_heads": 3, "depth": 2, "depth_single_blocks": 0, "guidance_embed": False}
SIZES_15 |= {"use_cond_type_embedding": True, "vision_in_dim": VISION, "meanflow_sum": True}
FILES = (
    tiny("hunyuan_video", "hunyuan_video.model.HunyuanVideo", 70, SIZES),
    tiny("hunyuan_video_15", "hunyuan_video.model.HunyuanVideo", 71, SIZES_15),
)
SIZE = {"width": WIDTH, "height": HEIGHT, "length": LENGTH, "batch_size": 1}
SIZE_15 = SIZE | {"height": 2 * HEIGHT}  # 16 pixels a side of a latent pixel: 7 x 10 tokens a frame


def text_to_video(graph: Workflow) -> None:
    """175 tokens of video, 11 of text, of which two are padding that attention leaves out.

    The negative is shorter: stock ComfyUI cannot run both in one batch where there is a mask.
    """
    prompts(graph, width=TEXT, tokens=11, negative_tokens=7, pooled=POOLED, masked=2)
    through(graph, "latent", "EmptyHunyuanLatentVideo", "latent_image", **SIZE)
    through(graph, "guidance", "FluxGuidance", "positive", conditioning=["positive", 0], guidance=6.0)


def image_to_video(graph: Workflow) -> None:
    """The first frame is given: its tokens have a timestep of zero."""
    text_to_video(graph)
    inputs = {"positive": ["guidance", 0], "vae": encoder(graph), "guidance_type": "v2 (replace)"}
    inputs |= {"start_image": picture(graph, "picture"), **SIZE}
    through(graph, "video", "HunyuanImageToVideo", "positive", "latent_image", **inputs)


def text_to_video_15(graph: Workflow) -> None:
    """350 tokens of video, 11 of text and 3 that spell what is to be written in it."""
    prompts(graph, width=TEXT, tokens=11, negative_tokens=7, pooled=POOLED)  # stock asks for it and uses none
    second_text(graph, "conditioning_byt5small", tokens=3, width=GLYPHS)
    through(graph, "latent", "EmptyHunyuanVideo15Latent", "latent_image", **SIZE_15)


def image_to_video_15(graph: Workflow) -> None:
    """A first picture beside the noise, and what CLIP vision sees in it."""
    prompts(graph, width=TEXT, tokens=11, negative_tokens=7, pooled=POOLED)  # stock asks for it and uses none
    graph["vision"] = node("RandomVisionOutput", tokens=13, width=VISION, seed=3)
    inputs = {"positive": ["positive", 0], "negative": ["negative", 0], "clip_vision_output": ["vision", 0], **SIZE_15}
    inputs |= {"vae": encoder(graph, channels=32, spatial=16), "start_image": picture(graph, "picture")}
    through(graph, "video", "HunyuanVideo15ImageToVideo", "positive", "negative", "latent_image", **inputs)


VARIANTS = variants(
    ("hunyuanvideo t2v", FAMILY, "hunyuan_video", text_to_video),
    ("hunyuanvideo i2v", FAMILY, "hunyuan_video", image_to_video),
    ("hunyuanvideo 1.5 t2v", FAMILY, "hunyuan_video_15", text_to_video_15),
    ("hunyuanvideo 1.5 i2v", FAMILY, "hunyuan_video_15", image_to_video_15),
)
