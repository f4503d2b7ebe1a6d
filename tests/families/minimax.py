"""MiniMax H3: one file; video with sound from a text, between two pictures, and by references of every kind.

Its blocks see one row of tokens: text, conditions, sound, video. Their numbers are primes here.
"""

from typing import Any

from host.client import Workflow

from .files import Rule, tiny
from .graphs import HEIGHT, VIDEO_AND_AUDIO, WIDTH, encoder, node, picture, separate, through
from .variant import variants

FAMILY = "MiniMax H3"
SIZES = {"hidden_size": 120, "num_layers": 3, "token_refiner_num_layers": 1, "ffn_hidden_size": 160, "text_dim": 40}
SIZES |= {"num_attention_heads": 5, "attention_head_dim": 32, "rope_inv_freq_len": 4}
SIZES |= {"timestep_input_dim": 32, "time_embed_hidden_size": 64, "time_embed_dim": 48}
FILES = (tiny("minimax_h3", "minimax.model.MiniMaxH3Model", 40, SIZES, rules=(Rule(r"inv_freq$", std=0.1, mean=0.4),)),)
TEXT_TOKENS = 12
SIZE = {"width": 2 * WIDTH, "height": 2 * HEIGHT, "length": 22}  # 7 frames of 10 x 14 latent pixels, 37 of sound
PICTURE = {"width": 2 * WIDTH, "height": 2 * HEIGHT}


def conditioned(graph: Workflow, class_type: str, **inputs: Any) -> None:
    """Both prompts through one of H3's nodes, which encode them and give the latent."""
    graph["clip"] = node("RandomTextEncoder", tokens=TEXT_TOKENS, width=SIZES["text_dim"])
    shared = {**SIZE, "clip": ["clip", 0], "vae": encoder(graph, channels=24, spatial=16), **inputs}
    through(graph, "negative", class_type, "negative", prompt="dim and still", **shared)
    through(graph, "positive", class_type, "positive", "latent_image", prompt="a lighthouse at dusk", **shared)
    separate(graph)


def text_to_video(graph: Workflow) -> None:
    """12 tokens of text, 74 of sound, 245 of video: 331."""
    conditioned(graph, "MiniMaxH3ImageToVideo")


def keyframes(graph: Workflow) -> None:
    """The first and the last picture, 35 tokens each: 401."""
    first, last = picture(graph, "first", **PICTURE), picture(graph, "last", **PICTURE)
    conditioned(graph, "MiniMaxH3ImageToVideo", first_frame=first, last_frame=last)


def references(graph: Workflow) -> None:
    """A picture of 6 tokens, a video of 8 with 12 of sound, and a sound of 10: 367."""
    graph["sound_vae"] = node("RandomSoundVAE", kind="stereo")
    graph["soundtrack"] = node("RandomSound", seconds=0.15, seed=4)
    graph["sound"] = node("RandomSound", seconds=0.125, seed=5)
    given = {
        "audio_vae": ["sound_vae", 0],
        "ref_image_size": "match",
        "ref_images.ref_image_0": picture(graph, "reference", width=96, height=64),
        "ref_videos.ref_video_0": picture(graph, "video", width=64, height=64, count=5),
        "ref_video_audios.ref_video_audio_0": ["soundtrack", 0],
        "ref_audios.ref_audio_0": ["sound", 0],
    }
    conditioned(graph, "MiniMaxH3ReferenceToVideo", **given)


VARIANTS = variants(
    ("minimax h3 t2v", FAMILY, "minimax_h3", text_to_video),
    ("minimax h3 keyframes", FAMILY, "minimax_h3", keyframes),
    ("minimax h3 references", FAMILY, "minimax_h3", references),
    latents=VIDEO_AND_AUDIO,
)
