"""Wan 2.1 and 2.2: files and graphs of text and image to video, 5B, VACE, camera; poses, speech, faces, music."""

from typing import Any

from host.client import Workflow

from .files import ModelFile, tiny
from .graphs import HEIGHT, LENGTH, WIDTH, encoder, node, picture, prompts, through
from .variant import variants

FAMILY = "Wan"
TEXT, TOKENS = 48, 13
HEAD_DIM = 24
SIZE = {"width": WIDTH, "height": HEIGHT, "length": LENGTH, "batch_size": 1}
ENDS = ("positive", "negative", "latent_image")  # what Wan's own nodes give, by the sampler's names
CONDITIONS = {"positive": ["positive", 0], "negative": ["negative", 0]}
# Without metadata ComfyUI takes heads of 128, 256 frequencies and a text of 4096.
TOLD = ("num_heads", "freq_dim", "text_dim")


def wan_file(
    name: str, kind: str, *, heads: int, seed: int, model: str = "model.WanModel", large: bool = False, **more: Any
) -> ModelFile:
    """A Wan file of heads of 24, three blocks. `large`: what is beside them has fixed widths."""
    sizes = {"num_heads": heads, "dim": heads * HEAD_DIM, "ffn_dim": 2 * heads * HEAD_DIM, "num_layers": 3}
    sizes |= {"freq_dim": 32, "text_dim": TEXT, "in_dim": 16, "out_dim": 16, "model_type": kind}
    return tiny(f"wan_{name}", f"wan.{model}", seed, sizes | more, told=TOLD, only_when_full=large)


def wide_file() -> ModelFile:
    """A file of which shapes tell everything, as most published ones: 5 heads of 128, a text of 4096 (57 MB)."""
    sizes = {"num_heads": 5, "dim": 640, "ffn_dim": 640, "num_layers": 2, "freq_dim": 256, "text_dim": 4096}
    sizes |= {"in_dim": 16, "out_dim": 16, "model_type": "t2v"}
    return tiny("wan_wide", "wan.model.WanModel", 20, sizes)


VACE = {"model": "model.VaceWanModel", "num_layers": 4, "vace_layers": 2, "vace_in_dim": 96}
DANCER = {"model": "model_wandancer.WanDancerModel", "in_dim": 36}
ANIMATE = {"num_layers": 5, "in_dim": 36}
FILES = (
    wide_file(),
    wan_file("t2v", "t2v", heads=5, seed=21),
    wan_file("i2v", "i2v", heads=4, seed=22, in_dim=36),
    wan_file("22_i2v", "t2v", heads=5, seed=23, in_dim=36),
    wan_file("22_5b", "t2v", heads=5, seed=24, in_dim=48, out_dim=48),
    wan_file("vace", "vace", heads=5, seed=25, **VACE),
    wan_file("camera", "camera", heads=4, seed=26, model="model.CameraWanModel", in_dim=32),
    wan_file("scail", "scail", heads=5, seed=27, model="model.SCAILWanModel", in_dim=20),
    wan_file("scail2", "scail2", heads=5, seed=28, model="model.SCAIL2WanModel", in_dim=20),
    wan_file("humo", "humo", heads=4, seed=29, model="model.HumoWanModel", large=True),
    wan_file("animate", "animate", heads=4, seed=30, model="model_animate.AnimateWanModel", large=True, **ANIMATE),
    wan_file("dancer", "wandancer", heads=5, seed=31, **DANCER),
)


def text_to_video(graph: Workflow) -> None:
    prompts(graph, width=TEXT, tokens=TOKENS)
    through(graph, "latent", "EmptyHunyuanLatentVideo", "latent_image", **SIZE)


def wide(graph: Workflow) -> None:
    """The same with the text width of published files."""
    text_to_video(graph)
    prompts(graph, width=4096, tokens=TOKENS)


def image_to_video(graph: Workflow) -> None:
    """A first picture, encoded and beside the noise, without CLIP vision: Wan 2.2."""
    prompts(graph, width=TEXT, tokens=TOKENS)
    inputs = {**CONDITIONS, **SIZE, "vae": encoder(graph), "start_image": picture(graph, "picture")}
    through(graph, "video", "WanImageToVideo", *ENDS, **inputs)


def image_to_video_with_vision(graph: Workflow) -> None:
    """The same, and what CLIP vision sees in it: Wan 2.1."""
    image_to_video(graph)
    graph["video"]["inputs"]["clip_vision_output"] = vision(graph)


def vision(graph: Workflow) -> list[Any]:
    """Adds CLIP vision's tokens of a picture and returns the link to them."""
    graph["vision"] = node("RandomVisionOutput", tokens=257, width=1280, seed=3)
    return ["vision", 0]


def five_b(graph: Workflow, **more: Any) -> None:
    """The 5B model's latent: 48 channels, 16 pixels a side of a latent pixel."""
    prompts(graph, width=TEXT, tokens=TOKENS)
    inputs = {**SIZE, "width": 2 * WIDTH, "height": 2 * HEIGHT, "vae": encoder(graph, channels=48, spatial=16)}
    through(graph, "latent", "Wan22ImageToVideoLatent", "latent_image", **inputs, **more)


def five_b_from_image(graph: Workflow) -> None:
    """The first frame is given: its tokens have a timestep of their own."""
    five_b(graph, start_image=picture(graph, "picture", width=2 * WIDTH, height=2 * HEIGHT))


def vace(graph: Workflow) -> None:
    """A video to follow; the reference picture becomes a frame before the others, five in all."""
    prompts(graph, width=TEXT, tokens=TOKENS)
    inputs = {**CONDITIONS, **SIZE, "length": LENGTH - 4, "vae": encoder(graph), "strength": 0.8}
    inputs["control_video"] = picture(graph, "control", count=LENGTH - 4)
    inputs["reference_image"] = picture(graph, "reference")
    through(graph, "video", "WanVaceToVideo", *ENDS, **inputs)


def camera(graph: Workflow) -> None:
    """A first picture, what CLIP vision sees in it, and a path of the camera."""
    prompts(graph, width=TEXT, tokens=TOKENS)
    path = {name: SIZE[name] for name in ("width", "height", "length")}
    graph["path"] = node("WanCameraEmbedding", camera_pose="Zoom In", speed=1.0, **path)
    inputs = {**CONDITIONS, **SIZE, "vae": encoder(graph), "start_image": picture(graph, "picture")}
    inputs |= {"camera_conditions": ["path", 0], "clip_vision_output": vision(graph)}
    through(graph, "video", "WanCameraImageToVideo", *ENDS, **inputs)


def scail(graph: Workflow, **more: Any) -> None:
    """A pose of half the size, a reference and what CLIP vision sees in it."""
    prompts(graph, width=TEXT, tokens=TOKENS)
    inputs = {**CONDITIONS, **SIZE, "vae": encoder(graph), "pose_video": picture(graph, "poses", count=LENGTH)}
    inputs |= {"pose_strength": 0.8, "pose_start": 0.0, "pose_end": 1.0, "clip_vision_output": vision(graph)}
    inputs |= {"reference_image": picture(graph, "reference"), "video_frame_offset": 0, "previous_frame_count": 5}
    through(graph, "video", "WanSCAILToVideo", *ENDS, **inputs, **more)


def scail_2(graph: Workflow) -> None:
    """The same with whose pose it is."""
    scail(graph, replacement_mode=True)
    graph["video"]["inputs"]["pose_video_mask"] = picture(graph, "who", count=LENGTH)
    graph["video"]["inputs"]["reference_image_mask"] = picture(graph, "who else")


def humo(graph: Workflow) -> None:
    """A reference picture, which is a frame behind the others, and silence."""
    prompts(graph, width=TEXT, tokens=TOKENS)
    inputs = {**CONDITIONS, **SIZE, "vae": encoder(graph), "ref_image": picture(graph, "reference")}
    through(graph, "video", "WanHuMoImageToVideo", *ENDS, **inputs)


def animate(graph: Workflow) -> None:
    """A character, poses, and one face, as what sees faces takes them in 512 x 512 pixels."""
    prompts(graph, width=TEXT, tokens=TOKENS)
    inputs = {**CONDITIONS, **SIZE, "vae": encoder(graph), "reference_image": picture(graph, "character")}
    inputs |= {"pose_video": picture(graph, "poses", count=LENGTH), "face_video": picture(graph, "face")}
    inputs |= {"clip_vision_output": vision(graph), "continue_motion_max_frames": 5, "video_frame_offset": 0}
    through(graph, "video", "WanAnimateToVideo", *ENDS, **inputs)


def dancer(graph: Workflow) -> None:
    """A first picture, what CLIP vision sees in it, and a second of music. A frame has 8 groups of 5 tokens."""
    prompts(graph, width=TEXT, tokens=TOKENS)
    graph["sound"] = node("RandomSound", seconds=1.0, seed=5)
    heard = node("WanDancerEncodeAudio", audio=["sound", 0], video_frames=LENGTH, audio_inject_scale=0.8)
    size = {"width": WIDTH + 16, "height": HEIGHT, "length": LENGTH}
    graph["music"] = heard
    inputs = {**CONDITIONS, **size, "vae": encoder(graph), "start_image": picture(graph, "picture")}
    inputs |= {"clip_vision_output": vision(graph), "audio_encoder_output": ["music", 0]}
    through(graph, "video", "WanDancerVideo", *ENDS, **inputs, clip_vision_output_ref=["vision", 0])


VARIANTS = variants(
    ("wan 2.1 t2v", FAMILY, "wan_t2v", text_to_video),
    ("wan 2.1 t2v, sizes by shapes", FAMILY, "wan_wide", wide),
    ("wan 2.1 i2v", FAMILY, "wan_i2v", image_to_video_with_vision),
    ("wan 2.1 vace", FAMILY, "wan_vace", vace),
    ("wan 2.1 camera", FAMILY, "wan_camera", camera),
    ("wan 2.2 i2v", FAMILY, "wan_22_i2v", image_to_video),
    ("wan 2.2 5b t2v", FAMILY, "wan_22_5b", five_b),
    ("wan 2.2 5b i2v", FAMILY, "wan_22_5b", five_b_from_image),
    ("wan 2.1 scail", FAMILY, "wan_scail", scail),
    ("wan 2.1 scail-2", FAMILY, "wan_scail2", scail_2),
    ("wan 2.1 humo", FAMILY, "wan_humo", humo),
    ("wan 2.2 animate", FAMILY, "wan_animate", animate),
    ("wan 2.2 dancer", FAMILY, "wan_dancer", dancer),
)
