"""What a template has beside its graph: the family, what it makes, a word on what to choose, where its files are.

Owns: the text of notes and thumbnails, the addresses and sizes of published files, and what fits on two cards. A graph
in API form has no place for them; drawn_workflows.py puts them into the file that the editor reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Template:
    """`family` and `makes` are the thumbnail's title; `choose` is a sentence of the note; `held`, of `LAYOUTS`, is how
    the plan that its graph fixes holds the weights, "" where auto takes what fits."""

    family: str
    makes: str
    choose: str
    held: str = ""

    def note(self, files: Sequence[dict[str, str]]) -> str:
        """The note of a template with these files (`downloads`): what it makes, what to get, what it fits."""
        about = f"**{self.family}**, {self.makes}, over the devices that SP Config names. {self.choose}"
        return (
            f"{about}\n\n{SHELL}\n\n```\n{shell_lines(files)}\n```\n\n{size_of(files)} in all. {fits(files, self.held)}"
        )


# The order of docs/get_models.md: what fits most cards first.
TEMPLATES = {
    "z_image_turbo": Template(
        "Z-Image Turbo", "text to image", "8 steps at cfg 1; for Z-Image itself choose its file, 25 steps and cfg 4."
    ),
    "krea2_turbo": Template(
        "Krea 2 Turbo", "text to image", "8 steps at cfg 1: there is no negative prompt to spend a device on."
    ),
    "minimax_h3_t2v": Template(
        "MiniMax H3",
        "text to video with sound",
        "Say in the prompt what is heard, too. Its own size is 1344 x 768, its length 17n + 5; cfg stays 1.",
    ),
    "wan22_t2v": Template(
        "Wan 2.2",
        "text to video",
        "The 5B model; the length is 4n + 1 pictures, 24 a second. Fewer pixels fit smaller devices. For the 14B "
        "models replace both loaders of ComfyUI's template video_wan2_2_14B_i2v.",
    ),
    "qwen_image": Template(
        "Qwen-Image", "text to image", "At cfg 4 two devices take a prompt each; 50 steps are the authors' setting."
    ),
    "ltx2_t2v": Template(
        "LTX-2",
        "text to video with sound",
        "Say in the prompt what is heard, too. Sizes go by 32, the length is 8n + 1.",
    ),
    "flux_parallel": Template(
        "Flux.1",
        "text to image",
        "Choose the prompt, the size and, in SP Config, the devices: all, 2, or cuda:0,cuda:1.",
    ),
    "flux_lora_controlnet": Template(
        "Flux.1", "LoRA and ControlNet", "Choose your LoRA, your ControlNet and the picture that it follows."
    ),
    "flux_kontext_edit": Template(
        "Flux.1 Kontext", "picture editing", "Choose the picture and say in the prompt what shall change."
    ),
    "flux_fill": Template(
        "Flux.1 Fill", "inpainting", "Choose a picture and draw its mask: what the mask covers is painted anew."
    ),
    "flux_batch_over_replicas": Template(
        "Flux.1",
        "a batch over replicas",
        "Each device has images of its own; set data, and the latent's batch_size, to the number of devices.",
        held="whole",
    ),
    "flux_pipefusion": Template(
        "Flux.1",
        "PipeFusion",
        "Each device holds a part of the blocks; set pipefusion to the number of devices.",
        held="sharded",
    ),
    "flux_benchmark": Template(
        "Flux.1", "a benchmark of plans", "Choose the plans to compare; one device and stock ComfyUI run beside them."
    ),
    "sdxl": Template(
        "SDXL",
        "prompt and negative at once",
        "Two devices take a side each, at any cfg scale above 1; SD1.5 and other U-Nets work alike.",
    ),
    "wan_t2v": Template(
        "Wan 2.1", "text to video", "Choose the size and the length, which is 4n + 1 pictures, 16 a second."
    ),
    "flux2_klein": Template(
        "Flux.2 klein", "text to image", "4 steps at cfg 1. Set the size twice: in Size and in the shift of the sigmas."
    ),
}

HUB = "https://huggingface.co/"
# As the templates that come with ComfyUI name them (comfyui-workflow-templates 0.11.27; of Krea 2, which is
# newer, comfyui-workflow-templates-json 0.1.123).
ADDRESSES = (
    "Comfy-Org/flux1-dev/resolve/main/flux1-dev.safetensors",
    "Comfy-Org/flux1-dev/resolve/main/split_files/diffusion_models/flux1-fill-dev.safetensors",
    "Comfy-Org/flux1-kontext-dev_ComfyUI/resolve/main/split_files/diffusion_models/"
    "flux1-dev-kontext_fp8_scaled.safetensors",
    "comfyanonymous/flux_text_encoders/resolve/main/clip_l.safetensors",
    "comfyanonymous/flux_text_encoders/resolve/main/t5xxl_fp16.safetensors",
    "Comfy-Org/z_image_turbo/resolve/main/split_files/vae/ae.safetensors",
    "Comfy-Org/Qwen-Image_ComfyUI/resolve/main/split_files/diffusion_models/qwen_image_fp8_e4m3fn.safetensors",
    "Comfy-Org/Qwen-Image_ComfyUI/resolve/main/split_files/text_encoders/qwen_2.5_vl_7b_fp8_scaled.safetensors",
    "Comfy-Org/Qwen-Image_ComfyUI/resolve/main/split_files/vae/qwen_image_vae.safetensors",
    "Comfy-Org/Wan_2.1_ComfyUI_repackaged/resolve/main/split_files/diffusion_models/wan2.1_t2v_1.3B_fp16.safetensors",
    "Comfy-Org/Wan_2.1_ComfyUI_repackaged/resolve/main/split_files/text_encoders/"
    "umt5_xxl_fp8_e4m3fn_scaled.safetensors",
    "Comfy-Org/Wan_2.1_ComfyUI_repackaged/resolve/main/split_files/vae/wan_2.1_vae.safetensors",
    "Comfy-Org/Wan_2.2_ComfyUI_Repackaged/resolve/main/split_files/diffusion_models/wan2.2_ti2v_5B_fp16.safetensors",
    "Comfy-Org/Wan_2.2_ComfyUI_Repackaged/resolve/main/split_files/vae/wan2.2_vae.safetensors",
    "Lightricks/LTX-2/resolve/main/ltx-2-19b-dev-fp8.safetensors",
    "Comfy-Org/ltx-2/resolve/main/split_files/text_encoders/gemma_3_12B_it_fp4_mixed.safetensors",
    "Comfy-Org/MiniMax-H3/resolve/main/diffusion_models/minimax_h3_fl2va_pruned_int8_convrot.safetensors",
    "Comfy-Org/MiniMax-H3/resolve/main/text_encoders/qwen3vl_32b_minimax_h3_nvfp4_awq.safetensors",
    "Comfy-Org/MiniMax-H3/resolve/main/vae/minimax_h3_video_vae_fp16.safetensors",
    "Comfy-Org/MiniMax-H3/resolve/main/vae/minimax_h3_audio_vae_fp32.safetensors",
    "Comfy-Org/z_image_turbo/resolve/main/split_files/diffusion_models/z_image_turbo_bf16.safetensors",
    "Comfy-Org/z_image_turbo/resolve/main/split_files/text_encoders/qwen_3_4b.safetensors",
    "Comfy-Org/flux2-klein/resolve/main/split_files/diffusion_models/flux-2-klein-4b.safetensors",
    "Comfy-Org/flux2-dev/resolve/main/split_files/vae/flux2-vae.safetensors",
    "Comfy-Org/Krea-2/resolve/main/diffusion_models/krea2_turbo_fp8_scaled.safetensors",
    "Comfy-Org/Krea-2/resolve/main/text_encoders/qwen3vl_4b_fp8_scaled.safetensors",
    "stabilityai/stable-diffusion-xl-base-1.0/resolve/main/sd_xl_base_1.0.safetensors",
)
URLS = {address.rpartition("/")[2]: HUB + address for address in ADDRESSES}
# GB (10^9 bytes) as published, in November 2026.
SIZES_GB = {
    "z_image_turbo_bf16.safetensors": 12.3,
    "qwen_3_4b.safetensors": 8.0,
    "ae.safetensors": 0.3,
    "krea2_turbo_fp8_scaled.safetensors": 13.1,
    "qwen3vl_4b_fp8_scaled.safetensors": 5.2,
    "qwen_image_vae.safetensors": 0.3,
    "minimax_h3_fl2va_pruned_int8_convrot.safetensors": 21.0,
    "qwen3vl_32b_minimax_h3_nvfp4_awq.safetensors": 15.7,
    "minimax_h3_video_vae_fp16.safetensors": 5.2,
    "minimax_h3_audio_vae_fp32.safetensors": 0.6,
    "wan2.2_ti2v_5B_fp16.safetensors": 10.0,
    "umt5_xxl_fp8_e4m3fn_scaled.safetensors": 6.7,
    "wan2.2_vae.safetensors": 1.4,
    "qwen_image_fp8_e4m3fn.safetensors": 20.4,
    "qwen_2.5_vl_7b_fp8_scaled.safetensors": 9.4,
    "ltx-2-19b-dev-fp8.safetensors": 27.1,
    "gemma_3_12B_it_fp4_mixed.safetensors": 9.4,
    "flux1-dev.safetensors": 23.8,
    "flux1-fill-dev.safetensors": 23.8,
    "flux1-dev-kontext_fp8_scaled.safetensors": 11.9,
    "clip_l.safetensors": 0.2,
    "t5xxl_fp16.safetensors": 9.8,
    "flux-2-klein-4b.safetensors": 7.8,
    "flux2-vae.safetensors": 0.3,
    "wan2.1_t2v_1.3B_fp16.safetensors": 2.8,
    "wan_2.1_vae.safetensors": 0.3,
    "sd_xl_base_1.0.safetensors": 6.9,
}
# No list with their bytes was seen: these sizes are about right.
ABOUT = {
    "umt5_xxl_fp8_e4m3fn_scaled.safetensors",
    "flux1-dev.safetensors",
    "flux1-fill-dev.safetensors",
    "flux1-dev-kontext_fp8_scaled.safetensors",
    "clip_l.safetensors",
    "t5xxl_fp16.safetensors",
    "wan2.1_t2v_1.3B_fp16.safetensors",
    "wan_2.1_vae.safetensors",
}
SHELL = "On the machine where ComfyUI runs, in ComfyUI's folder:"
CARDS_GB = (12, 16, 24)
# Of a card's memory so much may be used (HEADROOM of parallel_runtime/planner/choose.py).
CARD_SHARE = 0.95
# GiB on each of two cards with the weights whole, sharded and offloaded, as `python -m parallel_runtime plan --kind
# RTX4090 --free-gib 60` counts them for a file of the published sizes (pictures of 1024 x 1024, 121 frames of video).
COUNTED_GIB = {
    "z_image_turbo_bf16.safetensors": (12.9, 8.3, 2.9),
    "krea2_turbo_fp8_scaled.safetensors": (15.0, 10.2, 4.5),
    "wan2.2_ti2v_5B_fp16.safetensors": (14.6, 10.7, 6.1),
    "qwen_image_fp8_e4m3fn.safetensors": (20.5, 11.7, 2.2),
    "flux1-dev.safetensors": (23.5, 13.8, 2.8),
}
# Room beside the weights where nothing was counted; of a video as much as was counted for Wan 2.2.
ROOM_GIB, VIDEO_ROOM_GIB = 2.0, 5.3
VIDEOS = {
    "minimax_h3_fl2va_pruned_int8_convrot.safetensors",
    "ltx-2-19b-dev-fp8.safetensors",
    "wan2.1_t2v_1.3B_fp16.safetensors",
}
HELD = {
    "whole": "the whole model on each",
    "sharded": "half of the model on each",
    "offloaded": "one part at a time; host memory holds the model",
}
LAYOUTS = tuple(HELD)
USERS_OWN = {"flux_lora.safetensors", "flux1-dev-controlnet-union.safetensors"}  # stand for what a user has
# The folder of `models` that an input of a loader chooses from.
FOLDERS = {"unet_name": "diffusion_models", "ckpt_name": "checkpoints", "text_encoder": "text_encoders"}
FOLDERS |= dict.fromkeys(("clip_name", "clip_name1", "clip_name2"), "text_encoders")
FOLDERS |= {"vae_name": "vae", "lora_name": "loras", "control_net_name": "controlnet"}


def model_files(inputs: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Folder and name of each file that a node's inputs choose."""
    return ((FOLDERS[name], value) for name, value in inputs.items() if name in FOLDERS)


def downloads(inputs: dict[str, Any]) -> list[dict[str, str]]:
    """The `models` of a node's properties, by which ComfyUI offers to download what is missing.

    Raises KeyError for a file whose address is not here.
    """
    return [
        {"name": name, "url": URLS[name], "directory": folder}
        for folder, name in model_files(inputs)
        if name not in USERS_OWN
    ]


def offered(nodes: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """The files that the nodes of a template offer to download, each once."""
    files = [file for node in nodes for file in node["properties"].get("models", ())]
    return list({file["url"]: file for file in files}.values())


def shell_lines(files: Sequence[dict[str, str]]) -> str:
    """A line for each file that puts it into its folder, on a machine without a desktop."""
    return "\n".join(f"wget -c -P models/{file['directory']} {file['url']}" for file in files)


def size_of(files: Sequence[dict[str, str]]) -> str:
    """How much these files are, in GB; "about" where a size was not read from a list."""
    total = sum(SIZES_GB[file["name"]] for file in files)
    about = "About " if ABOUT & {file["name"] for file in files} else ""
    return f"{about}{total:.1f} GB"


def on_each_card(files: Sequence[dict[str, str]]) -> tuple[float, ...]:
    """GiB on each of two cards, by `LAYOUTS`: as the planner counted, else by the size of the file and some room."""
    (model,) = (file["name"] for file in files if file["directory"] in ("diffusion_models", "checkpoints"))
    size_gib, room = SIZES_GB[model] * 1e9 / 2**30, VIDEO_ROOM_GIB if model in VIDEOS else ROOM_GIB
    return COUNTED_GIB.get(model, (size_gib + room, size_gib / 2 + room, room))


def weights_on(files: Sequence[dict[str, str]], card_gb: int) -> str:
    """How two cards of this memory hold the model: the first of `LAYOUTS` that fits."""
    each = zip(LAYOUTS, on_each_card(files), strict=True)
    return next(layout for layout, gib in each if gib <= CARD_SHARE * card_gb)


def fits(files: Sequence[dict[str, str]], held: str) -> str:
    """How two cards of each usual memory hold the model: a list, in words that the page need not explain."""
    if held:
        gib = on_each_card(files)[LAYOUTS.index(held)]
        return (
            f"Its plan is fixed and has {HELD[held]}: {gib} GiB on each of two cards (predicted). For less choose a "
            "file in fp8, or set mode to auto."
        )
    lines = (f"- 2 x {card} GB: {HELD[weights_on(files, card)]}" for card in CARDS_GB)
    return "What two cards hold (predicted):\n\n" + "\n".join(lines)
