"""U-Nets: SD1.5, SD2, unCLIP, SDXL with its relatives; ControlNets, and a checkpoint's other parts.

ComfyUI's detection fixes the width of the first level (320), that of the text, and for SDXL the depth of each level's
transformers; the number of levels and their widths are the file's. So here each level is as wide as the first. SDXL
proper has 24 transformer blocks of the text's width at least, which makes 280 MB; KOALA has 7.
No plan shares their tokens: they are not among `FAMILIES`.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from host.client import Workflow
from host.tiny_models import write_layout

from .files import RULES, Rule, large, row, tiny
from .graphs import Add, node, prompts, through
from .variant import variants

PATH = "modules.diffusionmodules.openaimodel.UNetModel"
CLASS, OUT = f"comfy.ldm.{PATH}", {"out_channels": 4}
WIDTH, HEIGHT = 112, 80  # 14 x 10 latent pixels: an odd number of rows after the first halving
LEVEL = {"image_size": 32, "model_channels": 320, "use_spatial_transformer": True, "legacy": False}
TEXT_15, TEXT_XL, POOLED, SIZES_XL = 768, 2048, 1280, 2816  # 1280 and six sizes of 256 numbers


def levels(*blocks: int, text: int, deep: list[int], up: list[int], middle: int, channels: int = 4) -> dict[str, Any]:
    """Levels of so many blocks each, all 320 wide; `deep` and `up` are transformer blocks on the ways down and up."""
    return LEVEL | {
        "in_channels": channels,
        "num_res_blocks": list(blocks),
        "channel_mult": [1] * len(blocks),
        "transformer_depth": deep,
        "transformer_depth_output": up,
        "transformer_depth_middle": middle,
        "context_dim": text,
    }


def sdxl(*blocks: int, **sizes: Any) -> dict[str, Any]:
    """What SDXL and its relatives have in common: heads of 64, and a vector of the picture's sizes."""
    more = {"num_classes": "sequential", "adm_in_channels": SIZES_XL, "num_head_channels": 64}
    return levels(*blocks, text=TEXT_XL, **sizes) | more | {"use_linear_in_transformer": True}


SD15 = levels(1, 1, text=TEXT_15, deep=[0, 1], up=[0, 0, 1, 0], middle=1) | {"num_heads": 8}
KOALA = sdxl(1, 1, 1, deep=[0, 2, 5], up=[0, 0, 1, 0, 1, 0], middle=1)
SDXL = sdxl(2, 2, 2, deep=[0, 0, 2, 2, 10, 10], up=[0, 0, 0, 1, 0, 0, 2, 0, 0], middle=2)
SVD = levels(4, 4, text=1024, deep=[1, 1, 1, 1, 1, 1, 0, 0], up=[0, 1, 0, 0, 0, 1, 0, 1, 0, 0], middle=1, channels=8)
SVD |= {"num_head_channels": 64, "num_classes": "sequential", "adm_in_channels": 768, "use_linear_in_transformer": True}
SVD |= {"extra_ff_mix_layer": True, "use_spatial_context": True, "merge_strategy": "learned_with_images"}
SVD |= {"merge_factor": 0.0, "video_kernel_size": [3, 1, 1], "use_temporal_resblock": True}
SVD |= {"use_temporal_attention": True, "disable_temporal_crossattention": False}
# Four levels of two blocks, in whose last one ComfyUI sees that it predicts v.
SD2 = levels(2, 2, 2, 2, text=1024, deep=[1, 1, 1, 1, 1, 1, 0, 0], up=[1, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0], middle=1)
SD2 |= {"num_head_channels": 64, "use_linear_in_transformer": True}
UNCLIP_IMAGE = 768
UNCLIP = levels(1, 1, text=1024, deep=[0, 1], up=[0, 0, 1, 0], middle=1) | {"num_head_channels": 64}
UNCLIP |= {"use_linear_in_transformer": True, "num_classes": "sequential", "adm_in_channels": 2 * UNCLIP_IMAGE}
SSD1B = sdxl(2, 2, 2, deep=[0, 0, 2, 2, 4, 4], up=[0, 0, 0, 1, 0, 0, 1, 0, 0], middle=1)
VEGA = sdxl(2, 2, 2, deep=[0, 0, 1, 1, 2, 2], up=[0, 0, 0, 1, 0, 0, 1, 0, 0], middle=1)
REFINER = sdxl(2, 2, 2, 2, deep=[0, 0, 4, 4, 4, 4, 0, 0], up=[0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0], middle=1)
REFINER |= {"model_channels": 384, "context_dim": 1280, "adm_in_channels": 2560}
V = Rule(r"output_blocks\.11\.1\.transformer_blocks\.0\.norm1\.bias$", std=0.3)  # by which SD2 predicts v
FILES = (
    large("sd15", PATH, 90, SD15 | OUT),
    tiny("koala", PATH, 91, KOALA | OUT, dtype=torch.bfloat16),  # 150 MB
    large("sdxl", PATH, 92, SDXL | OUT),
    large("svd", PATH, 93, SVD | OUT),
    replace(large("sd2", PATH, 94, SD2 | OUT), rules=(V,)),
    large("unclip", PATH, 95, UNCLIP | OUT),
    large("ssd1b", PATH, 96, SSD1B | OUT),
    large("vega", PATH, 97, VEGA | OUT),
    large("sdxl_refiner", PATH, 98, REFINER | OUT),
)


def of_size(text: int, *, tokens: int = 77, pictures: int = 1, **more: int) -> Add:
    """Prompts of equal length, which go through the model as one batch, and pictures of 14 x 10 latent pixels."""

    def add(graph: Workflow) -> None:
        prompts(graph, width=text, tokens=tokens, **more)
        size = {"width": WIDTH, "height": HEIGHT, "batch_size": pictures}
        through(graph, "latent", "EmptyLatentImage", "latent_image", **size)

    return add


xl = of_size(TEXT_XL, pooled=POOLED)
sd2 = of_size(1024)


def unclip(graph: Workflow) -> None:
    """What CLIP vision says of a picture, with noise, instead of a size."""
    sd2(graph)
    graph["seen"] = node("RandomVisionOutput", tokens=5, width=UNCLIP_IMAGE, seed=3)
    for name in ("positive", "negative"):
        inputs = {"conditioning": [name, 0], "clip_vision_output": ["seen", 0], "strength": 1.0}
        through(graph, f"{name} unclip", "unCLIPConditioning", name, noise_augmentation=0.1, **inputs)


VARIANTS = variants(
    ("sd1.5", "U-Net", "sd15", of_size(TEXT_15)),
    ("sdxl koala", "U-Net", "koala", xl),
    ("sdxl", "U-Net", "sdxl", xl),
    ("svd", "U-Net", "svd", of_size(1024, tokens=1, pictures=3)),
    ("sd2, v", "U-Net", "sd2", sd2),
    ("sd2.1 unclip", "U-Net", "unclip", unclip),
    ("ssd-1b", "U-Net", "ssd1b", xl),
    ("segmind vega", "U-Net", "vega", xl),
    ("sdxl refiner", "U-Net", "sdxl_refiner", of_size(1280, pooled=POOLED)),
)
OF_UNET = ("time_embed.", "label_emb.", "input_blocks.", "middle_block.")  # what a ControlNet has of its U-Net
HINT = (3, 16, 16, 32, 32, 96, 96, 256, 320)  # channels on the way from the picture to the first level


def write_controlnet(path: Path, unet: Path) -> Path:
    """Writes a ControlNet for the U-Net of a file, as its layers are named there: a copy of the way down, and more."""
    with safe_open(unet, framework="pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys() if name.startswith(OF_UNET)}
    convolutions = {f"input_hint_block.{2 * step}": (*HINT[step : step + 2], 3) for step in range(len(HINT) - 1)}
    outputs = len({name.split(".")[1] for name in shapes if name.startswith("input_blocks.")})
    convolutions |= {f"zero_convs.{number}.0": (320, 320, 1) for number in range(outputs)}
    for name, (taken, given, side) in (convolutions | {"middle_block_out.0": (320, 320, 1)}).items():
        shapes |= {f"{name}.weight": [given, taken, side, side], f"{name}.bias": [given]}
    rows = [row(name, tuple(shape), RULES) for name, shape in shapes.items()]
    return write_layout(path, rows, seed=95, dtype=torch.bfloat16)


def write_checkpoint(path: Path, unet: Path, **more: torch.Tensor) -> Path:
    """Writes a checkpoint with the U-Net of a file and `more` tensors, which a diffusion model's file has not."""
    around = {"first_stage_model.encoder.conv_in.bias": torch.zeros(4), **more}
    path.parent.mkdir(exist_ok=True)
    save_file({f"model.diffusion_model.{name}": each for name, each in load_file(unet).items()} | around, path)
    return path
