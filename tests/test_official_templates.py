"""What `make templates` does with a template's graph, its rows and its page, on made-up graphs; nothing is run."""

import json
from dataclasses import replace

import torch

from families.graphs import node
from host.client import Workflow
from tools.official_templates.page import document, summary
from tools.official_templates.swap import ours, small, stock_otherwise, without_exchange
from tools.official_templates.trial import Row, compared

WAN = "wan2.1_t2v_1.3B_fp16.safetensors"


def described(output: str, **inputs: str) -> dict:
    return {"output": output.split(), "input": {"required": {name: [kind, {}] for name, kind in inputs.items()}}}


INFO = {
    "UNETLoader": described("MODEL", unet_name="COMBO"),
    "CLIPLoader": described("CLIP", clip_name="COMBO"),
    "CLIPTextEncode": described("CONDITIONING", clip="CLIP", text="STRING"),
    "LoraLoaderModelOnly": described("MODEL", model="MODEL", lora_name="COMBO"),
    "EmptyLatentImage": described("LATENT", width="INT", height="INT"),
    "ResolutionSelector": described("INT INT"),
    "KSampler": described("LATENT", model="MODEL", positive="CONDITIONING", negative="CONDITIONING", steps="INT"),
    "VAEDecode": described("IMAGE", samples="LATENT", vae="VAE"),
}


def template() -> Workflow:
    """A graph from a loader to a picture."""
    return {
        "model": node("UNETLoader", unet_name=WAN, weight_dtype="fp8_e4m3fn"),
        "clip": node("CLIPLoader", clip_name="umt5.safetensors"),
        "text": node("CLIPTextEncode", clip=["clip", 0], text="a harbour"),
        "size": node("ResolutionSelector", megapixels=1.0),
        "latent": node("EmptyLatentImage", width=["size", 0], height=1080),
        "sampler": node(
            "KSampler",
            **{"model": ["model", 0], "positive": ["text", 0], "negative": ["text", 0], "steps": 20},
            latent_image=["latent", 0],
        ),
        "picture": node("VAEDecode", samples=["sampler", 0], vae=["nowhere", 0]),
    }


def test_a_template_is_its_own_but_for_files_sizes_and_steps() -> None:
    graph = template()
    graph["lora"] = node("LoraLoaderModelOnly", model=["model", 0], lora_name="style.safetensors", strength_model=0.7)
    graph["sampler"]["inputs"]["model"] = ["lora", 0]
    made = small(graph, INFO)
    assert made.graph["model"] == node("UNETLoader", unet_name="tiny_wan_t2v.safetensors", weight_dtype="fp8_e4m3fn")
    assert made.graph["lora"]["inputs"]["lora_name"] == "tiny_wan_t2v.safetensors"
    assert {folder for folder, _ in made.files} == {"diffusion_models", "loras"}
    (size,) = (made.graph[made.graph["latent"]["inputs"]["width"][0]],)
    assert size == node("AtMost", value=["size", 0], most=224) and made.graph["latent"]["inputs"]["height"] == 160
    assert made.graph["text"]["inputs"]["text"] == "a harbour"
    clip = made.graph[made.graph["text"]["inputs"]["clip"][0]]
    assert clip["class_type"] == "StandInText" and json.loads(clip["inputs"]["sizes"])["width"] == 48
    assert "picture" not in made.graph and made.graph["keep sampler 0"]["inputs"]["samples"] == ["sampler", 0]
    assert graph["model"]["inputs"]["unet_name"] == WAN, "the template itself was changed"


PLANS = {True: {"mode": "manual", "ulysses": 2}, False: {"mode": "manual", "cfg": 2}}


def test_the_loader_alone_is_swapped_and_the_control_stands_behind_it() -> None:
    made = small(template(), INFO)
    swapped = ours(made, PLANS)
    model, config = swapped.pop("model"), swapped.pop("config True")
    assert model["class_type"] == "ParallelModelLoader" and model["inputs"]["weight_dtype"] == "fp8_e4m3fn"
    assert model["inputs"]["sp_config"] == ["config True", 0] and config == node("SPConfig", **PLANS[True])
    assert swapped == {name: each for name, each in made.graph.items() if name != "model"}
    apart = without_exchange(made, PLANS)
    assert apart["sampler"]["inputs"]["model"] == ["control model", 0]
    assert apart["control model"] == node("SwitchOffExchange", model=["model", 0], rows=False)
    kernel = stock_otherwise(made, {"kernel": "attention_basic", "threads": 2})
    assert kernel["sampler"]["inputs"]["model"] == ["kernel model", 0] and kernel["model"] == made.graph["model"]


def test_an_error_is_seen_in_any_latent_and_a_missing_one_too() -> None:
    stock = {"a": torch.ones(3), "b": torch.ones(4)}
    assert compared(stock, stock) == (0.0, "")
    assert compared(stock, stock | {"b": torch.full((4,), 1.001)})[1].startswith("differs by 1.0e-03")
    assert compared(stock, stock | {"b": torch.full((4,), float("nan"))})[0] == float("inf")
    assert "2 latents" not in compared(stock, stock | {"b": torch.ones(5)})[1] != ""
    assert compared(stock, {"a": torch.ones(3)})[1] == "1 latents where stock has 2"


def test_the_last_line_says_what_is_wrong() -> None:
    rows = [Row("a", "equal", uses=90), Row("b", "refused", uses=6, node="FluxKVCache", why="it patches | blocks")]
    page = document({"ComfyUI 0.30.0": rows})
    assert page.endswith("\n2 templates, 0 wrong\n") and "| `b` | 6 | FluxKVCache | it patches \\| blocks |" in page
    assert summary([*rows, replace(rows[0], result="wrong")]) == "3 templates, 1 wrong"
