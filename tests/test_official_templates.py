"""What `make templates` does with a template's graph, its rows and its page, on made-up graphs; nothing is run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from families.graphs import node
from host.client import Workflow
from tools.official_templates import package
from tools.official_templates.models import tiny_of
from tools.official_templates.page import document, summary
from tools.official_templates.swap import NotTriedError, Small, ours, small, without_exchange
from tools.official_templates.trial import Row, Rows, compared

WAN, Z_IMAGE = "wan2.1_t2v_1.3B_fp16.safetensors", "z_image_turbo_bf16.safetensors"


def described(output: str, **inputs: str) -> dict:
    """A node as /object_info describes it."""
    return {"output": output.split(), "input": {"required": {name: [kind, {}] for name, kind in inputs.items()}}}


INFO = {
    "UNETLoader": described("MODEL", unet_name="COMBO"),
    "CheckpointLoaderSimple": described("MODEL CLIP VAE", ckpt_name="COMBO"),
    "CLIPLoader": described("CLIP", clip_name="COMBO"),
    "CLIPTextEncode": described("CONDITIONING", clip="CLIP", text="STRING"),
    "LoraLoaderModelOnly": described("MODEL", model="MODEL", lora_name="COMBO"),
    "EmptyLatentImage": described("LATENT", width="INT", height="INT"),
    "LoadImage": described("IMAGE MASK", image="COMBO"),
    "VAEEncode": described("LATENT", pixels="IMAGE", vae="VAE"),
    "ResolutionSelector": described("INT INT"),
    "KSampler": described("LATENT", model="MODEL", positive="CONDITIONING", negative="CONDITIONING", steps="INT"),
    "VAEDecode": described("IMAGE", samples="LATENT", vae="VAE"),
}


def template(file: str = WAN, *, name: str = "model", sampler: str = "sampler") -> Workflow:
    """A graph from a loader to a saved picture; nodes of two such have other names."""
    loaded, text = f"{name} clip", f"{name} text"
    return {
        name: node("UNETLoader", unet_name=file, weight_dtype="fp8_e4m3fn"),
        loaded: node("CLIPLoader", clip_name="umt5.safetensors"),
        text: node("CLIPTextEncode", clip=[loaded, 0], text="a harbour"),
        "size": node("ResolutionSelector", megapixels=1.0),
        f"{name} latent": node("EmptyLatentImage", width=["size", 0], height=1080),
        sampler: node(
            "KSampler",
            **{"model": [name, 0], "positive": [text, 0], "negative": [text, 0], "steps": 20},
            latent_image=[f"{name} latent", 0],
        ),
        f"{name} picture": node("VAEDecode", samples=[sampler, 0], vae=["nowhere", 0]),
    }


def test_a_template_is_its_own_but_for_files_sizes_and_steps() -> None:
    graph = template()
    graph["lora"] = node("LoraLoaderModelOnly", model=["model", 0], lora_name="style.safetensors", strength_model=0.7)
    graph["sampler"]["inputs"]["model"] = ["lora", 0]
    made = small(graph, INFO)
    assert made.graph["model"] == node("UNETLoader", unet_name="tiny_wan_t2v.safetensors", weight_dtype="fp8_e4m3fn")
    assert made.graph["lora"]["inputs"]["lora_name"] == "tiny_wan_t2v.safetensors"
    assert {folder for folder, _ in made.files} == {"diffusion_models", "loras"}
    (size,) = (made.graph[made.graph["model latent"]["inputs"]["width"][0]],)
    assert size == node("AtMost", value=["size", 0], most=224) and made.graph["model latent"]["inputs"]["height"] == 160
    assert made.graph["model text"]["inputs"]["text"] == "a harbour"
    clip = made.graph[made.graph["model text"]["inputs"]["clip"][0]]
    assert clip["class_type"] == "StandInText" and json.loads(clip["inputs"]["sizes"])["width"] == 48
    assert "model picture" not in made.graph and made.graph["keep sampler 0"]["inputs"]["samples"] == ["sampler", 0]
    assert graph["model"]["inputs"]["unet_name"] == WAN, "the template itself was changed"


def test_the_loader_alone_is_swapped_and_the_control_stands_behind_it() -> None:
    made = small(template(), INFO)
    plan = {"mode": "manual", "ulysses": 2}
    swapped = ours(made, plan)
    model, config = swapped.pop("model"), swapped.pop("config")
    assert model["class_type"] == "ParallelModelLoader" and model["inputs"]["weight_dtype"] == "fp8_e4m3fn"
    assert config == node("SPConfig", **plan)
    assert swapped == {name: each for name, each in made.graph.items() if name != "model"}
    apart = without_exchange(made, plan, rows=False)
    assert apart["sampler"]["inputs"]["model"] == ["control model", 0]
    assert apart["control model"] == node("SwitchOffExchange", model=["model", 0], rows=False)


def test_two_loaders_and_a_checkpoint_are_all_swapped() -> None:
    graph = template() | template(Z_IMAGE, name="second", sampler="later")
    graph["second"] = node("CheckpointLoaderSimple", ckpt_name=Z_IMAGE)
    graph["second clip"] = graph["second"]
    graph["second text"]["inputs"]["clip"] = ["second", 1]
    made = small(graph, INFO)
    swapped = ours(made, {})
    assert swapped["sampler"]["inputs"]["model"] == ["model", 0]
    assert swapped["later"]["inputs"]["model"] == ["parallel second", 0]
    assert swapped["parallel second"]["inputs"]["model"] == ["second", 0]
    assert made.models == ["small_z_image", "wan_t2v"]
    widths = {json.loads(each["inputs"]["sizes"])["width"] for each in made.graph.values() if "sizes" in each["inputs"]}
    assert widths == {48}


def test_a_loader_that_feeds_nothing_is_left_alone() -> None:
    graph = template() | {"unused": node("UNETLoader", unet_name="other.safetensors")}
    assert "unused" not in ours(small(graph, INFO), {})


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"model": node("UNETLoader", unet_name="renamed.safetensors")}, "no tiny file stands for renamed.safetensors"),
        ({"sampler": node("TheirSampler")}, "no stock sampler node is active"),
        ({"model": node("TheirLoader", name=WAN)}, "TheirLoader gives MODEL, which nothing stands for"),
        ({"model latent": node("TheirLatent")}, "TheirLatent gives unknown, which nothing stands for"),
    ],
    ids=["a file of another name", "a sampler of a pack", "a loader of a pack", "a node of a pack"],
)
def test_what_cannot_be_tried_says_why(change: Workflow, why: str) -> None:
    with pytest.raises(NotTriedError, match=why):
        small(template() | change, INFO)


def test_a_link_to_nowhere_is_said() -> None:
    graph = template()
    del graph["model clip"]
    with pytest.raises(NotTriedError, match="node model clip, .* is not in the graph"):
        small(graph, INFO)


def test_what_makes_an_input_of_a_pack_becomes_one_by_its_type() -> None:
    graph = template() | {"image": node("TheirGenerator"), "vae": node("CheckpointLoaderSimple", ckpt_name="wan_2.1")}
    graph["model latent"] = node("VAEEncode", pixels=["image", 0], vae=["vae", 2])
    made = small(graph, INFO).graph
    assert made[made["model latent"]["inputs"]["pixels"][0]]["class_type"] == "RandomPictures"
    assert made[made["model latent"]["inputs"]["vae"][0]]["class_type"] == "RandomVAE"


def test_files_are_known_with_and_without_folders() -> None:
    assert tiny_of(f"wan/{WAN}") is tiny_of(rf"sub\{WAN}") is tiny_of(WAN) is not None
    assert tiny_of(f"my_{WAN}") is None


def test_an_error_is_seen_in_any_latent_and_a_missing_one_too() -> None:
    stock = {"a": torch.ones(3), "b": torch.ones(4)}
    assert compared(stock, stock) == (0.0, "")
    assert compared(stock, stock | {"b": torch.full((4,), 1.001)})[1].startswith("differs by 1.0e-03")
    assert compared(stock, stock | {"b": torch.full((4,), float("nan"))})[0] == float("inf")
    assert "2 latents" not in compared(stock, stock | {"b": torch.ones(5)})[1] != ""
    assert compared(stock, {"a": torch.ones(3)})[1] == "1 latents where stock has 2"


def test_a_run_goes_on_where_it_was_ended(tmp_path: Path) -> None:
    path = tmp_path / "kept" / "rows.jsonl"
    rows = Rows(path)
    rows.add(Row("one", "equal", models=("wan",)))
    rows.add(Row("two", "wrong", why="crashed"))
    with path.open("a") as file:
        file.write('{"name": "three", "resu')  # ended while it wrote
    again = Rows(path)
    assert again.done("one") and not again.done("two") and not again.done("three")
    again.add(Row("two", "refused", node="FluxKVCache"))
    assert Rows(path).known == {"one": Row("one", "equal", models=("wan",)), "two": again.known["two"]}


def test_the_page_counts_and_its_last_line_says_what_is_wrong() -> None:
    rows = [
        Row("a", "equal", uses=90, plan="ulysses 2", control=0.1),
        Row("b", "refused", uses=6, node="FluxKVCache", why="it patches | blocks"),
        Row("c", "not tried", uses=4, why="no tiny file stands for c.safetensors"),
    ]
    page = document([("ComfyUI 0.30.0", rows)])
    assert page.endswith("\n3 templates, 0 wrong\n")
    assert "**90.0%** of the use" in page and "93.8% of the use of those that could be tried" in page
    assert "| `b` | 6 | FluxKVCache | it patches \\| blocks |" in page
    assert summary([*rows, replace(rows[0], result="wrong")]) == "4 templates, 1 wrong"


def test_templates_are_those_with_a_loader_by_their_use(tmp_path: Path) -> None:
    index = [{"templates": [{"name": "used", "usage": 5}, {"name": "api"}]}]
    nested = {"definitions": {"subgraphs": [{"nodes": [{"type": "UNETLoader"}]}]}}
    files = {"index": index, "used": nested, "new": {"nodes": [{"type": "CheckpointLoaderSimple"}]}, "api": {}}
    for name, text in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(text))
    assert [(each.name, each.uses) for each in package.templates(tmp_path)] == [("used", 5), ("new", 0)]


@pytest.mark.parametrize(("line", "found"), [("comfyui_workflow_templates==1.2  # big", True), ("torch", False)])
def test_the_tree_says_which_templates_are_its_own(tmp_path: Path, line: str, found: bool) -> None:
    (tmp_path / "requirements.txt").write_text(f"comfyui-workflow-templates-extra==3\n{line}\n")
    if found:
        assert package.required(tmp_path) == "comfyui_workflow_templates==1.2"
    else:
        with pytest.raises(package.NoTemplatesError, match="names no comfyui-workflow-templates==VERSION"):
            package.required(tmp_path)


def test_no_checkpoint_is_taken_for_a_shared_plan() -> None:
    shared, rows = tiny_of(WAN), replace(tiny_of(WAN), file=replace(tiny_of(WAN).file, class_path="comfy.ldm.a.UNet"))
    assert Small({}, [("diffusion_models", shared)]).shares_tokens
    assert not Small({}, [("diffusion_models", shared), ("checkpoints", rows)]).shares_tokens
