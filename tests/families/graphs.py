"""The parts that the families' graphs share: loader, sampler, saved latent, conditionings and a VAE without weights.

Owns: node ids. "model" is the loader, "sampler" a KSampler, "save" a SaveLatent; a family adds "positive", "negative"
and "latent", and puts nodes of its own between them and the sampler.
"""

from collections.abc import Callable
from typing import Any

from host.client import Workflow
from host.workflows import node

WIDTH, HEIGHT = 112, 80  # 14 x 10 latent pixels, 7 x 5 tokens: 35, which neither 2 nor 3 divides
Add = Callable[[Workflow], None]
LENGTH = 17  # pictures: 5 latent frames, 175 tokens
PROMPT_SEED, NEGATIVE_SEED, PICTURE_SEED = 11, 12, 13


def plain(file: str, *, cfg: float, seed: int, steps: int) -> Workflow:
    """Loader, sampler and what saves; its latent and conditionings are not there yet."""
    return {
        "model": node("UNETLoader", unet_name=file, weight_dtype="default"),
        "sampler": node(
            "KSampler",
            **{"model": ["model", 0], "positive": ["positive", 0], "negative": ["negative", 0]},
            **{"latent_image": ["latent", 0], "seed": seed, "steps": steps, "cfg": cfg},
            **{"sampler_name": "euler", "scheduler": "simple", "denoise": 1.0},
        ),
        "save": node("SaveLatent", samples=["sampler", 0], filename_prefix="latent"),
    }


def prompts(graph: Workflow, *, width: int, tokens: int, negative_tokens: int | None = None, **more: int) -> None:
    """Adds "positive" and "negative"; those of equal length go through the model as one batch.

    `more` are inputs of RandomConditioning: `pooled`, a vector's width, and `masked`, tokens that are padding.
    """
    lengths = {"positive": tokens, "negative": negative_tokens or tokens}
    for name, seed in (("positive", PROMPT_SEED), ("negative", NEGATIVE_SEED)):
        graph[name] = node("RandomConditioning", tokens=lengths[name], width=width, seed=seed, **more)


def through(graph: Workflow, name: str, class_type: str, *outputs: str, **inputs: Any) -> None:
    """Adds a node whose outputs, in order, take the places of the sampler's inputs of these names ("" leaves one)."""
    graph[name] = node(class_type, **inputs)
    for slot, output in enumerate(outputs):
        if output:
            graph["sampler"]["inputs"][output] = [name, slot]


def second_text(graph: Workflow, entry: str, *, tokens: int, width: int, **more: int) -> None:
    """Adds to both prompts what a second text encoder gives, under ComfyUI's name for it; `more` as MoreText's."""
    for name in ("positive", "negative"):
        inputs = {"conditioning": [name, 0], "name": entry, "tokens": tokens, "width": width, "seed": len(name), **more}
        graph[f"{name} second"] = node("MoreText", **inputs)
        graph["sampler"]["inputs"][name] = [f"{name} second", 0]


def picture(graph: Workflow, name: str, *, width: int = WIDTH, height: int = HEIGHT, count: int = 1) -> list[Any]:
    """Adds random pictures and returns the link to them."""
    graph[name] = node("RandomPictures", width=width, height=height, count=count, seed=PICTURE_SEED + len(graph))
    return [name, 0]


def encoder(graph: Workflow, *, channels: int = 16, spatial: int = 8, temporal: int = 4) -> list[Any]:
    """Adds a VAE that encodes and returns the link to it."""
    graph["vae"] = node("RandomVAE", channels=channels, spatial=spatial, temporal=temporal)
    return ["vae", 0]


def picture_of(
    text: int, latent: str = "EmptySD3LatentImage", *, width: int = WIDTH, height: int = HEIGHT, **more: int
) -> Add:
    """Adds prompts of unequal length and an empty latent, 35 tokens of 2 x 2; `more` as RandomConditioning's."""

    def add(graph: Workflow) -> None:
        prompts(graph, width=text, tokens=11, negative_tokens=7, **more)
        through(graph, "latent", latent, "latent_image", width=width, height=height, batch_size=1)

    return add


def with_references(graph: Workflow, *sizes: tuple[int, int]) -> None:
    """Pictures of such sizes as references of both prompts; the graph has a VAE (`encoder`)."""
    for number, (width, height) in enumerate(sizes):
        pixels = picture(graph, f"picture {number}", width=width, height=height)
        graph[f"reference {number}"] = node("VAEEncode", pixels=pixels, vae=["vae", 0])
        for name in ("positive", "negative"):
            inputs = {"conditioning": graph["sampler"]["inputs"][name], "latent": [f"reference {number}", 0]}
            through(graph, f"edit {name} {number}", "ReferenceLatent", name, **inputs)


def at_timestep_zero(graph: Workflow) -> None:
    """References are modulated by a timestep of 0, as Qwen-Image-Edit 2511's."""
    for name in ("positive", "negative"):
        inputs = {"conditioning": graph["sampler"]["inputs"][name], "reference_latents_method": "index_timestep_zero"}
        through(graph, f"method {name}", "FluxKontextMultiReferenceLatentMethod", name, **inputs)


def separate(graph: Workflow) -> None:
    """Saves a joint latent's video as "save" and its audio as "save audio"."""
    graph["separate"] = node("LTXVSeparateAVLatent", av_latent=["sampler", 0])
    graph["save"]["inputs"]["samples"] = ["separate", 0]
    graph["save audio"] = node("SaveLatent", samples=["separate", 1], filename_prefix="audio")


VIDEO_AND_AUDIO = ("save", "save audio")
