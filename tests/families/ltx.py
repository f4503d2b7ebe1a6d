"""LTX-Video and LTX-2: files and graphs of video from a text, from a picture and by a guide; LTX-2 with sound."""

from typing import Any

from host.client import Workflow

from .files import Rule, tiny
from .graphs import VIDEO_AND_AUDIO, encoder, node, picture, prompts, separate, through
from .variant import variants

FAMILY = "LTX"
UNSHOWN = """class LTXAV(LTXV):
    def __init__(self):
        self.latent_rgb_factors = None
"""
TEXT, TOKENS = 48, 13
SIZE = {"width": 224, "height": 160, "length": 33, "batch_size": 1}  # 5 frames of 5 x 7, a token each: 175
PICTURE = {"width": 224, "height": 160}
VIDEO = {"attention_head_dim": 32, "num_attention_heads": 5, "cross_attention_dim": 160, "caption_channels": TEXT}
VIDEO |= {"num_layers": 3}
SOUND = {"audio_attention_head_dim": 16, "audio_num_attention_heads": 4, "audio_cross_attention_dim": 64}
CONNECTOR = {"connector_attention_head_dim": 16, "connector_num_attention_heads": 3, "connector_num_layers": 1}
# What files of LTX-2 say of themselves beside their sizes.
LTX_2 = {"rope_type": "split", "frequencies_precision": "float64", "use_middle_indices_grid": True}
LTX_2 |= {"timestep_scale_multiplier": 1000, "causal_temporal_positioning": True}


BOTH = {**VIDEO, **SOUND, **CONNECTOR, **LTX_2}
REGISTERS = (Rule(r"learnable_registers$", std=1.0),)
FILES = (  # whose metadata tell all sizes, as those of published files do
    tiny("ltx_video", "lightricks.model.LTXVModel", 50, VIDEO, told=tuple(VIDEO), rules=REGISTERS),
    tiny("ltx_2", "lightricks.av_model.LTXAVModel", 51, BOTH, told=tuple(BOTH), rules=REGISTERS),
)


def conditioned(graph: Workflow) -> None:
    """Two prompts with a frame rate; of the text's tokens the last two are padding."""
    prompts(graph, width=TEXT, tokens=TOKENS, masked=2)
    inputs = {"positive": ["positive", 0], "negative": ["negative", 0], "frame_rate": 25.0}
    through(graph, "rate", "LTXVConditioning", "positive", "negative", **inputs)


def conditions() -> dict[str, Any]:
    """The links to both, for a node that comes after."""
    return {"positive": ["rate", 0], "negative": ["rate", 1]}


def text_to_video(graph: Workflow) -> None:
    conditioned(graph)
    through(graph, "latent", "EmptyLTXVLatentVideo", "latent_image", **SIZE)


def image_to_video(graph: Workflow) -> None:
    """The first picture is nearly given: each token has a timestep of its own."""
    conditioned(graph)
    inputs = {**conditions(), **SIZE, "vae": video_encoder(graph), "image": picture(graph, "picture", **PICTURE)}
    ends = ("positive", "negative", "latent_image")
    through(graph, "video", "LTXVImgToVideo", *ends, strength=0.9, **inputs)


def guided(graph: Workflow, strength: float = 1.0) -> None:
    """A picture as a guide in the middle: 35 tokens of its own behind the video's."""
    text_to_video(graph)
    inputs = {**conditions(), "vae": video_encoder(graph), "latent": ["latent", 0]}
    inputs |= {"image": picture(graph, "picture", **PICTURE), "frame_idx": 16, "strength": strength}
    through(graph, "guide", "LTXVAddGuide", "positive", "negative", "latent_image", **inputs)


def weakly_guided(graph: Workflow) -> None:
    """The same with less attention between guide and video, which is a mask in an object of LTX's own."""
    guided(graph, strength=0.7)


def video_encoder(graph: Workflow) -> list[Any]:
    return encoder(graph, channels=128, spatial=32, temporal=8)


def with_sound(graph: Workflow) -> None:
    """Joins 13 frames of empty sound to whatever latent the sampler has.

    LTX-2's encoder gives no mask, and its registers fill a text up to 128 tokens.
    """
    prompts(graph, width=TEXT, tokens=101)
    graph["sound_vae"] = node("RandomSoundVAE", kind="spectral")
    inputs = {"frames_number": SIZE["length"], "frame_rate": 25.0, "batch_size": 1, "audio_vae": ["sound_vae", 0]}
    graph["sound"] = node("LTXVEmptyLatentAudio", **inputs)
    video = graph["sampler"]["inputs"]["latent_image"]
    through(graph, "joint", "LTXVConcatAVLatent", "latent_image", video_latent=video, audio_latent=["sound", 0])
    separate(graph)


def text_to_video_with_sound(graph: Workflow) -> None:
    """175 tokens of video and 13 of sound, which attend to each other."""
    text_to_video(graph)
    with_sound(graph)


def image_to_video_with_sound(graph: Workflow) -> None:
    """The same with the first picture nearly given."""
    image_to_video(graph)
    with_sound(graph)


VARIANTS = variants(
    ("ltx-video t2v", FAMILY, "ltx_video", text_to_video),
    ("ltx-video i2v", FAMILY, "ltx_video", image_to_video),
    ("ltx-video guide", FAMILY, "ltx_video", guided),
    ("ltx-video weak guide", FAMILY, "ltx_video", weakly_guided),
)
VARIANTS += variants(
    ("ltx-2 t2v", FAMILY, "ltx_2", text_to_video_with_sound),
    ("ltx-2 i2v", FAMILY, "ltx_2", image_to_video_with_sound),
    latents=VIDEO_AND_AUDIO,
    unshown=UNSHOWN,
)
