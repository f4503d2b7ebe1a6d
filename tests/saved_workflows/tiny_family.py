"""A family's workflow made small: its tiny file, encoders and VAEs without weights, few pixels and steps."""

from typing import Any

from host.client import Workflow

SMALL = {"width": 128, "height": 96, "length": 9, "steps": 1, "warmup": 0, "runs": 1}
# The variant of tests/families that has the tiny file, and that file.
VARIANTS = {
    "wan2.1_t2v_1.3B_fp16.safetensors": ("wan 2.1 t2v", "tiny_wan_t2v.safetensors"),
    "wan2.2_ti2v_5B_fp16.safetensors": ("wan 2.2 5b t2v", "tiny_wan_22_5b.safetensors"),
    "qwen_image_fp8_e4m3fn.safetensors": ("qwen-image", "tiny_qwen_image.safetensors"),
    "flux-2-klein-4b.safetensors": ("flux.2 klein", "tiny_flux_2_klein.safetensors"),
    "z_image_turbo_bf16.safetensors": ("z-image", "tiny_z_image.safetensors"),
    "krea2_turbo_fp8_scaled.safetensors": ("krea 2", "tiny_krea_2.safetensors"),
    "minimax_h3_fl2va_pruned_int8_convrot.safetensors": ("minimax h3 t2v", "tiny_minimax_h3.safetensors"),
    "ltx-2-19b-dev-fp8.safetensors": ("ltx-2 t2v", "tiny_ltx_2.safetensors"),
    "sd_xl_base_1.0.safetensors": ("sdxl koala", "tiny_koala.safetensors"),
}


def stand_in(class_type: str, **inputs: Any) -> dict[str, Any]:
    """What a node becomes; its title stays."""
    return {"class_type": class_type, "inputs": inputs}


def text(tokens: int, width: int, **more: int) -> dict[str, Any]:
    """A text encoder; `pooled`: the width of a vector that it gives beside."""
    return stand_in("RandomTextEncoder", tokens=tokens, width=width, **more)


def vae(channels: int, spatial: int, temporal: int) -> dict[str, Any]:
    """A VAE: pixels a side of a latent pixel, pictures a frame."""
    return stand_in("RandomVAE", channels=channels, spatial=spatial, temporal=temporal)


# By the file that a node loads.
STAND_INS = {
    "umt5_xxl_fp8_e4m3fn_scaled.safetensors": text(13, 48),
    "qwen_2.5_vl_7b_fp8_scaled.safetensors": text(13, 3584),
    "qwen_3_4b.safetensors": text(13, 48),
    "qwen3vl_4b_fp8_scaled.safetensors": text(11, 240),  # 3 layers of 80
    "qwen3vl_32b_minimax_h3_nvfp4_awq.safetensors": text(12, 40),
    "gemma_3_12B_it_fp4_mixed.safetensors": text(101, 48),
    "wan_2.1_vae.safetensors": vae(16, 8, 4),
    "wan2.2_vae.safetensors": vae(48, 16, 4),
    "qwen_image_vae.safetensors": vae(16, 8, 1),
    "ae.safetensors": vae(16, 8, 1),
    "flux2-vae.safetensors": vae(128, 16, 1),
    "minimax_h3_video_vae_fp16.safetensors": vae(24, 16, 4),
    "minimax_h3_audio_vae_fp32.safetensors": stand_in("RandomSoundVAE", kind="stereo"),
}
LTX_SOUND_VAE = stand_in("RandomSoundVAE", kind="spectral")
# What a checkpoint has beside the model, by its loader's output.
IN_CHECKPOINT = {
    "ltx-2-19b-dev-fp8.safetensors": {2: vae(128, 32, 8)},
    "sd_xl_base_1.0.safetensors": {1: text(77, 2048, pooled=1280), 2: vae(4, 8, 0)},
}


def family_of(graph: Workflow) -> str | None:
    """The published file of a family that this graph loads; None for what the session's server has."""
    names = {node["inputs"].get(name) for node in graph.values() for name in ("unet_name", "ckpt_name")}
    return next((name for name in VARIANTS if name in names), None)


def variant_of(graph: Workflow) -> str:
    """The variant whose file `tiny_family` puts in. Raises KeyError for a graph of no family."""
    return VARIANTS[family_of(graph) or ""][0]


def file_of(graph: Workflow) -> str:
    """That file. Raises KeyError for a graph of no family."""
    return VARIANTS[family_of(graph) or ""][1]


def tiny_family(graph: Workflow) -> Workflow:
    """The same graph with the family's tiny file, encoders without weights, and few pixels and steps."""
    file = file_of(graph)
    for name, node in list(graph.items()):
        given = node["inputs"]
        given |= {key: value for key, value in SMALL.items() if isinstance(given.get(key), int)}
        loaded = [value for value in given.values() if isinstance(value, str) and value in STAND_INS]
        if "unet_name" in given:
            given["unet_name"] = file
        elif loaded:
            node |= STAND_INS[loaded[0]]
        elif node["class_type"] == "SPConfig":
            given["devices"] = "cpu:2"
        elif node["class_type"] == "PrimitiveInt":
            given["value"] = SMALL["length"]
        elif node["class_type"] == "LTXVScheduler":
            given["steps"] = 2  # it divides zero by zero for one
        elif node["class_type"] == "LTXVAudioVAELoader":
            node |= LTX_SOUND_VAE
        elif node["class_type"] == "CheckpointLoaderSimple":
            for output, part in IN_CHECKPOINT[given["ckpt_name"]].items():
                graph[f"{name} {output}"] = part
                relink(graph, [name, output], [f"{name} {output}", 0])
            node |= stand_in("UNETLoader", unet_name=file, weight_dtype="default")
    return graph


def relink(graph: Workflow, source: list[Any], to: list[Any]) -> None:
    """Whatever was linked to one output is linked to another."""
    for node in graph.values():
        node["inputs"] |= {key: to for key, value in node["inputs"].items() if value == source}
