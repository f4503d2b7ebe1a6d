"""What stands for each file that templates name: a tiny model of the same class, encoders and VAEs without weights.

Owns: which tiny model stands for a published file, by its name, and what its encoders give. Does not own: how tiny
files are written (tests/families/files.py), what becomes of the graph (swap.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from families import sd3, small, unet
from families.files import ModelFile
from families.flux import SHAPE as FLUX_SHAPE
from families.variants import FILES
from families.wan import wan_file
from host import layouts
from parallel_runtime.models.specs import SPECS

FLUX_CLASS = "comfy.ldm.flux.model.Flux"
VISION = (13, 1280, 1024)


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """A tiny model: its file, and what encoders beside it would give.

    `text`: StandInText's sizes. `prompt_node`: what stands for CLIPTextEncode where a text has no encoder.
    `beside`: shapes of what its checkpoint has beside it, by name.
    """

    file: ModelFile
    text: Mapping[str, Any]
    vision: tuple[int, int, int] = VISION  # tokens, their width, that of what is pooled
    hearing: tuple[int, int, int] = (1, 16, 768)  # layers, frames, width
    prompt_node: str = ""
    beside: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Its file's name."""
        return self.file.name

    @property
    def short(self) -> str:
        """That name as pages show it."""
        return self.name.removeprefix("tiny_").removesuffix(".safetensors")

    @property
    def shares_tokens(self) -> bool:
        """Whether ranks share its tokens; else they share the rows of a batch."""
        return self.file.class_path in SPECS


def text(width: int, tokens: int = 11, **more: object) -> dict[str, Any]:
    """A text encoder's sizes."""
    return {"width": width, "tokens": tokens, **more}


def wan(name: str, **more: tuple[int, int, int]) -> Tiny:
    """Wan by the name of its file."""
    return Tiny(file=FILES[f"tiny_wan_{name}.safetensors"], text=text(48), vision=(257, 1280, 1024), **more)


def more_wan(name: str, kind: str, seed: int, **sizes: Any) -> Tiny:  # noqa: ANN401  arguments of a class
    """Wan of a kind that no variant of the tests has."""
    file = wan_file(name, kind, heads=5, seed=seed, **sizes)
    file = replace(file, told=(*file.told, *(name for name in sizes if name not in ("model", "large"))))
    return Tiny(file=file, text=text(48), vision=(257, 1280, 1024))


def flux(name: str, seed: int, **sizes: Any) -> Tiny:  # noqa: ANN401  fields of a dataclass
    """Flux.1 of other channels, or without guidance."""
    layout = tuple(layouts.flux(replace(FLUX_SHAPE, **sizes)))
    file = ModelFile(name=f"tiny_flux_{name}.safetensors", class_path=FLUX_CLASS, layout=layout, seed=seed)
    return Tiny(file=file, text=text(64, pooled=32))


def of_family(
    name: str, width: int, tokens: int = 11, *, vision: tuple[int, int, int] = VISION, **more: object
) -> Tiny:
    """A file of tests/families by its name."""
    return Tiny(file=FILES[f"tiny_{name}.safetensors"], text=text(width, tokens, **more), vision=vision)


SPEECH = {"model": "model.WanModel_S2V", "audio_dim": 24, "num_layers": 2, "audio_inject_layers": [0, 1]}
SECONDS = "conditioner.conditioners.seconds_{}.embedder.embedding.{}"
SOUND_BESIDE = {SECONDS.format(end, "0.weights"): (128,) for end in ("start", "total")}
SOUND_BESIDE |= {SECONDS.format(end, "1.weight"): (768, 257) for end in ("start", "total")}
SOUND_BESIDE |= {SECONDS.format(end, "1.bias"): (768,) for end in ("start", "total")}
SOUND_3_BESIDE = {SECONDS.format("total", "1.weight"): (768, 256), SECONDS.format("total", "1.bias"): (768,)}
UNET = {"class_path": unet.CLASS, "dtype": torch.bfloat16}
LOTUS_SIZES = unet.SD2 | {"out_channels": 4, "num_classes": "sequential", "adm_in_channels": 4}
LOTUS = ModelFile(name="tiny_lotus.safetensors", arguments=LOTUS_SIZES, seed=144, **UNET)
TINY: dict[str, Tiny] = {
    "flux.1": of_family("flux_1", 64, pooled=32, vision=(29, 32, 32)),
    "flux.1 schnell": flux("schnell", 141, guidance=False),
    "flux.1 fill": flux("fill", 142, in_channels=96),
    "flux.1 canny": flux("canny", 143, in_channels=32),
    "flux.2": of_family("flux_2", 48),
    "flux.2 klein": of_family("flux_2_klein", 48),
    "chroma": Tiny(file=small.CHROMA, text=text(48)),
    "chroma radiance": of_family("chroma_radiance", 48),
    "longcat": Tiny(file=small.LONGCAT, text=text(3584)),
    "ovis": Tiny(file=small.OVIS, text=text(48)),
    "z-image": Tiny(file=small.Z_IMAGE, text=text(48, mask=True)),
    "lumina 2": Tiny(file=small.LUMINA, text=text(48, mask=True)),
    "newbie": Tiny(file=small.NEWBIE, text=text(48, pooled=32, mask=True)),
    "omnigen 2": Tiny(file=small.OMNIGEN, text=text(48, mask=True)),
    "qwen-image": Tiny(file=small.QWEN, text=text(48)),
    "qwen-image layered": Tiny(file=small.QWEN_LAYERED, text=text(48)),
    "krea 2": of_family("krea_2", 240),
    "ernie": of_family("ernie", 48),
    "boogu": of_family("boogu", 48, mask=True),
    "mage-flow": of_family("mage_flow", 2560, mask=True),
    "pixeldit": of_family("pixeldit", 48),
    "pid": of_family("pid", 48),
    "anima": of_family("anima", 1024, words={"t5xxl_ids": [9]}),
    "hidream-o1": replace(of_family("hidream_o1", 96), prompt_node="HiDreamO1Prompt"),
    "hidream": Tiny(file=small.HIDREAM, text=text(48, pooled=32, more={"conditioning_llama3": [1, 3, 11, 40]})),
    "ideogram 4": Tiny(file=small.IDEOGRAM, text=text(48, mask=True)),
    "lens": of_family("lens", 96, mask=True),
    "joyimage": of_family("joyimage", 4096),
    "kandinsky 5": of_family("kandinsky_5", 3584, pooled=768),
    "hunyuanvideo": of_family("hunyuan_video", 48, pooled=768),
    "hunyuanvideo 1.5": of_family(
        "hunyuan_video_15", 48, pooled=768, more={"conditioning_byt5small": [1, 3, 1472]}, vision=(13, 1152, 1152)
    ),
    "hunyuan3d 2": of_family("hunyuan3d_2", 48, vision=(13, 48, 48)),
    "hunyuan3d 2.1": of_family("hunyuan3d_2_1", 1024, vision=(13, 1024, 1024)),
    "minimax h3": of_family("minimax_h3", 40, 12, tags=True),
    "ltx-video": of_family("ltx_video", 48, mask=True),
    "ltx-2": of_family("ltx_2", 48, 101),
    "sd3.5 large": Tiny(file=sd3.CONTROLLED, text=text(48, pooled=sd3.CONTROLLED_POOLED)),
    "sd1.5": of_family("sd15", 768, 77),
    "sdxl": of_family("koala", 2048, 77, pooled=1280, vision=(5, 1280, 1280)),
    "sdxl refiner": of_family("sdxl_refiner", 1280, 77, pooled=1280, vision=(5, 1280, 1280)),
    "svd": of_family("svd", 1024, 1, vision=(5, 1024, 1024)),
    "lotus": Tiny(file=LOTUS, text=text(1024, 77)),
    "stable audio 1": Tiny(file=small.SOUND, text=text(768), beside=SOUND_BESIDE),
    "stable audio 3": Tiny(file=small.SOUND_3, text=text(768), beside=SOUND_3_BESIDE),
    "ace 1": Tiny(file=small.ACE, text=text(48, words={"conditioning_lyrics": [1, 9]})),
    "ace 1.5": Tiny(file=small.ACE_15, text=text(48, more={"conditioning_lyrics": [1, 5, 48]})),
    "wan t2v": wan("t2v"),
    "wan i2v": wan("i2v"),
    "wan 2.2 i2v": wan("22_i2v"),
    "wan 2.2 5b": wan("22_5b"),
    "wan vace": wan("vace"),
    "wan camera": wan("camera"),
    "wan scail-2": wan("scail2"),
    "wan humo": wan("humo", hearing=(33, 50, 1280)),
    "wan dancer": wan("dancer"),
    **({"wan animate 2": wan("animate2")} if "tiny_wan_animate2.safetensors" in FILES else {}),  # from 0.33 on
    "wan s2v": replace(more_wan("s2v", "s2v", 151, **SPEECH), hearing=(25, 50, 24)),
    "wan 2.2 camera": more_wan("22_camera", "camera_2.2", 152, model="model.CameraWanModel", in_dim=36),
    "wan 2.2 control": more_wan("22_control", "t2v", 153, in_dim=52, in_dim_ref_conv=16),
    "wan 2.2 5b control": more_wan("22_5b_control", "t2v", 154, in_dim=148, out_dim=48, in_dim_ref_conv=48),
    "wan 2.2 5b inpaint": more_wan("22_5b_inpaint", "t2v", 155, in_dim=100, out_dim=48),
    "wan 2.1 control": more_wan("21_control", "i2v", 156, in_dim=48),
    "wan flf": more_wan("flf", "i2v", 157, in_dim=36, flf_pos_embed_token_number=514),
}
# The first pattern that a file's name holds counts.
MODELS: Sequence[tuple[str, str]] = (
    (r"^flux1-schnell", "flux.1 schnell"),
    (r"^flux1-fill|^flux\.1-fill", "flux.1 fill"),
    (r"^flux1-(canny|depth)-dev\.", "flux.1 canny"),
    (r"^flux1-(dev|krea)", "flux.1"),
    (r"^flux-2-klein", "flux.2 klein"),
    (r"^flux2_dev|^flux2-dev", "flux.2"),
    (r"^Chroma1", "chroma"),
    (r"^chroma-radiance", "chroma radiance"),
    (r"^longcat_image", "longcat"),
    (r"^ovis_image", "ovis"),
    (r"^z_image", "z-image"),
    (r"^NetaYume", "lumina 2"),
    (r"^NewBie", "newbie"),
    (r"^omnigen2", "omnigen 2"),
    (r"^qwen_image_layered", "qwen-image layered"),
    (r"^qwen_image|^FireRed-Image-Edit", "qwen-image"),
    (r"^krea2", "krea 2"),
    (r"^ernie-image", "ernie"),
    (r"^boogu_image", "boogu"),
    (r"^mage_flow", "mage-flow"),
    (r"^pixeldit", "pixeldit"),
    (r"^pid_flux1", "pid"),
    (r"^anima-(base|preview)", "anima"),
    (r"^hidream_o1", "hidream-o1"),
    (r"^hidream_(i1|e1)", "hidream"),
    (r"^ideogram4", "ideogram 4"),
    (r"^lens_", "lens"),
    (r"^joyai_image", "joyimage"),
    (r"^kandinsky5", "kandinsky 5"),
    (r"^hunyuan_video", "hunyuanvideo"),
    (r"^hunyuanvideo1\.5|^capybara", "hunyuanvideo 1.5"),
    (r"^hunyuan3d-dit-v2[-_](mv|fp16)", "hunyuan3d 2"),
    (r"^hunyuan_3d_v2\.1", "hunyuan3d 2.1"),
    (r"^minimax_h3", "minimax h3"),
    (r"^ltx-video", "ltx-video"),
    (r"^ltx-2", "ltx-2"),
    (r"^sd3\.5_large", "sd3.5 large"),
    (r"^v1-5-|^DreamShaper_8", "sd1.5"),
    (r"^sd_xl_refiner", "sdxl refiner"),
    (r"^sd_xl", "sdxl"),
    (r"^svd", "svd"),
    (r"^lotus-depth", "lotus"),
    (r"^stable-audio-open", "stable audio 1"),
    (r"^stable_audio_3", "stable audio 3"),
    (r"^ace_step_v1_", "ace 1"),
    (r"^ace_step_1\.5|^acestep_v1\.5", "ace 1.5"),
    (r"^wan2\.1_flf2v", "wan flf"),
    (r"^wan2\.1_fun_camera", "wan camera"),
    (r"^wan2\.1_fun_control", "wan 2.1 control"),
    (r"^wan2\.1_vace", "wan vace"),
    (r"^wan2\.1_14B_SCAIL_2", "wan scail-2"),
    (r"^humo", "wan humo"),
    (r"^wan2\.2_dancer", "wan dancer"),
    (r"^wan2\.2_s2v", "wan s2v"),
    (r"^wan_animate_2", "wan animate 2"),
    (r"^wan2\.2_fun_camera", "wan 2.2 camera"),
    (r"^wan2\.2_fun_control_5B", "wan 2.2 5b control"),
    (r"^wan2\.2_fun_control", "wan 2.2 control"),
    (r"^wan2\.2_fun_inpaint_5B", "wan 2.2 5b inpaint"),
    (r"^wan2\.2_(i2v|fun_inpaint)", "wan 2.2 i2v"),
    (r"^wan2\.2_ti2v_5B", "wan 2.2 5b"),
    (r"^wan2\.[12]_(t2v|bernini|alpha)", "wan t2v"),
    (r"^wan2\.1_(i2v|fun_inp|wanmove)|^Wan2_1-I2V|^Wan21-WanMove|^chrono_edit", "wan i2v"),
)
# Channels, pixels a side of a latent pixel, pictures a frame (0: pictures stay pictures).
VAES: Sequence[tuple[str, tuple[int, int, int]]] = (
    (r"^ae\.|^flux1-|^NetaYume|^sd3", (16, 8, 0)),
    (r"^wan_2\.1|^Wan2_1|^qwen_image|^hunyuan_video_vae|^cogvideox", (16, 8, 4)),
    (r"^wan2\.2_vae", (48, 16, 4)),
    (r"^flux2-vae|^full_encoder_small_decoder|^mage_flow", (128, 16, 0)),
    (r"^hunyuanvideo15", (32, 16, 4)),
    (r"^minimax_h3_video", (24, 16, 4)),
    (r"^ltx-", (128, 32, 8)),
    (r"^sd_xl|^v1-5|^DreamShaper|^vae-ft-mse|^svd", (4, 8, 0)),
)


def tiny_of(name: str) -> Tiny | None:
    """The tiny model that stands for a file; None where there is none."""
    return next((TINY.get(tiny) for pattern, tiny in MODELS if re.search(pattern, base(name))), None)


def vae_of(name: str) -> tuple[int, int, int] | None:
    """What a VAE's file, or a checkpoint with one, does to sizes; None where that is not known."""
    return next((sizes for pattern, sizes in VAES if re.search(pattern, base(name))), None)


def base(name: str) -> str:
    """A file's name without its folders, which a template may write either way."""
    return re.split(r"[\\/]", name)[-1]
