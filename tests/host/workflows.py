"""Stock ComfyUI workflows in API form over the tiny models: the graphs everything of ours is compared with.

Node ids are words, so a failing test says which node it was. Every builder returns a fresh dict to change freely.
"""

import copy
from typing import Any

from .client import Workflow
from .tiny_models import TinyModels


def node(class_type: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": class_type, "inputs": inputs}


def text_to_image(
    tiny: TinyModels,
    *,
    width: int = 128,
    height: int = 128,
    steps: int = 2,
    seed: int = 7,
    batch: int = 1,
    prompt: str = "a lighthouse at dusk",
    guidance: float = 3.5,
    sampler: str = "euler",
) -> Workflow:
    """Flux dev as everybody's first graph has it: UNETLoader, KSampler at cfg 1, VAEDecode, SaveImage."""
    return {
        "model": node("UNETLoader", unet_name=tiny.dev, weight_dtype="default"),
        "clip": node("TinyDualCLIPLoader", clip_name1=tiny.clip_l, clip_name2=tiny.t5, type="flux"),
        "vae": node("VAELoader", vae_name=tiny.vae),
        "positive": node("CLIPTextEncode", clip=["clip", 0], text=prompt),
        "guidance": node("FluxGuidance", conditioning=["positive", 0], guidance=guidance),
        "negative": node("ConditioningZeroOut", conditioning=["positive", 0]),
        "latent": node("EmptySD3LatentImage", width=width, height=height, batch_size=batch),
        "sampler": node(
            "KSampler",
            model=["model", 0],
            positive=["guidance", 0],
            negative=["negative", 0],
            latent_image=["latent", 0],
            seed=seed,
            steps=steps,
            cfg=1.0,
            sampler_name=sampler,
            scheduler="simple",
            denoise=1.0,
        ),
        "decode": node("VAEDecode", samples=["sampler", 0], vae=["vae", 0]),
        "save": node("SaveImage", images=["decode", 0], filename_prefix="stock"),
    }


def between(graph: Workflow, name: str, class_type: str, **inputs: Any) -> Workflow:
    """The graph with one more node between its model and all that samples with it."""
    graph = copy.deepcopy(graph)
    link = graph["sampler"]["inputs"].get("model") or graph["guider"]["inputs"]["model"]
    for each in graph.values():
        if each["inputs"].get("model") == link:
            each["inputs"]["model"] = [name, 0]
    graph[name] = node(class_type, model=link, **inputs)
    return graph


def with_lora(graph: Workflow, name: str, *, strength: float = 1.0) -> Workflow:
    return between(graph, "lora", "LoraLoaderModelOnly", lora_name=name, strength_model=strength)


def with_controlnet(graph: Workflow, tiny: TinyModels, name: str, image: str, *, strength: float = 0.7) -> Workflow:
    """Applies a ControlNet with an uploaded hint image to both conditionings."""
    graph["image"] = node("LoadImage", image=image)
    graph["controlnet"] = node("ControlNetLoader", control_net_name=name)
    source = "controlnet"
    if name == tiny.controlnet_union:
        graph["union_type"] = node(
            "SetUnionControlNetType", control_net=["controlnet", 0], type="canny/lineart/anime_lineart/mlsd"
        )
        source = "union_type"
    inputs = graph["sampler"]["inputs"]
    graph["apply"] = node(
        "ControlNetApplyAdvanced",
        positive=inputs["positive"],
        negative=inputs["negative"],
        control_net=[source, 0],
        image=["image", 0],
        vae=["vae", 0],
        strength=strength,
        start_percent=0.0,
        end_percent=1.0,
    )
    inputs["positive"], inputs["negative"] = ["apply", 0], ["apply", 1]
    return graph
