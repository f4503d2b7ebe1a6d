"""Wan-Animate 2: a character that a video drives, in all steps and in some."""

from dataclasses import replace

from host.client import Workflow

from .graphs import LENGTH, encoder, picture, prompts, through
from .variant import variants
from .wan import CONDITIONS, ENDS, SIZE, TEXT, TOKENS, TOLD, vision, wan_file

FAMILY = "Wan-Animate 2"
MODEL = "model_animate2.WanAnimate2Model"
# ComfyUI takes the kind of these weights from metadata alone
FILES = (
    replace(wan_file("animate2", "animate2", heads=4, seed=33, model=MODEL, in_dim=36), told=(*TOLD, "model_type")),
)


def animate(graph: Workflow, **more: float) -> None:
    """A character, and a driving video of as many frames; the reference is a frame before the others."""
    prompts(graph, width=TEXT, tokens=TOKENS)
    inputs = {**CONDITIONS, **SIZE, "vae": encoder(graph), "reference_image": picture(graph, "character")}
    inputs |= {"pose_video": picture(graph, "poses", count=LENGTH), "video_frame_offset": 0}
    inputs |= {"pose_strength": 1.0, "pose_start_percent": 0.0, "pose_end_percent": 1.0}
    inputs |= {"reference_image_strength": 1.0, "clip_vision_output": vision(graph)} | more
    through(graph, "video", "WanAnimate2ToVideo", *ENDS, **inputs)


def for_some_steps(graph: Workflow) -> None:
    """The video drives the first half of the steps alone, weakly; the reference counts more."""
    animate(graph, pose_strength=0.6, pose_end_percent=0.5, reference_image_strength=1.5)


VARIANTS = variants(
    ("wan-animate 2", FAMILY, "wan_animate2", animate),
    ("wan-animate 2, pose in some steps", FAMILY, "wan_animate2", for_some_steps),
)
