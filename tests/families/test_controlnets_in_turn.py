"""Two parallel MODELs in turn in one ComfyUI, the second with each kind of ControlNet: each equal to stock.

ComfyUI loads what it has loaded again when a ControlNet has encoded its picture; a rest of the model before would fail
there. Small files, whose sizes the test host tells ComfyUI.
"""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rounding import ROUNDING
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from host.client import ComfyClient, Workflow
from host.pack_workflows import latent_of, parallel, relative_error
from host.quantised import FORMATS

from .conftest import Stock
from .files import write_model_files
from .graphs import Add, encoder, node, picture, picture_of, through
from .hosted import VISIBLE, between, ours, parallelized, small, with_loras
from .sd3 import CONTROLLED as SD3
from .sd3 import CONTROLLED_POOLED as SD3_POOLED
from .sd3 import DEPTH, controlnet_of_sd35
from .sd3 import TEXT as SD3_TEXT
from .small import QWEN, TEXT, Z_IMAGE
from .variant import Variant

FILES = (QWEN, Z_IMAGE, SD3)
EMBEDDERS = {"sd35_y.safetensors": True, "sd35_x.safetensors": False}  # by file: copies y_embedder, or x_embedder
LORA = "sd35_embedders_lora.safetensors"


def write_files(models: Path) -> list[Path]:
    """The models, the ControlNets and a LoRA of what these copy, in a models folder."""
    paths = write_model_files(models / "diffusion_models", FILES)
    nets = [controlnet_of_sd35(name, double=double) for name, double in EMBEDDERS.items()]
    paths += write_model_files(models / "controlnet", nets)
    (models / "loras").mkdir(exist_ok=True)
    paths.append(models / "loras" / LORA)
    numbers, wide = torch.Generator().manual_seed(5), 64 * DEPTH
    changes = {"y_embedder.mlp.0": (wide, SD3_POOLED), "x_embedder.proj": (wide, 16 * 4)}
    weights = {}
    for layer, (rows, columns) in changes.items():
        up = torch.randn(rows, 4, generator=numbers)
        down = torch.randn(4, columns, generator=numbers) / columns**0.5
        shaped = (down.view(4, 16, 2, 2), up[:, :, None, None]) if layer == "x_embedder.proj" else (down, up)
        weights |= dict(zip((f"diffusion_model.{layer}.lora_{side}.weight" for side in "AB"), shaped, strict=True))
    save_file(weights, paths[-1])
    return paths


@pytest.fixture(scope="module", autouse=True)
def files(family_models: Path) -> Iterator[None]:
    paths = write_files(family_models)
    yield
    for path in paths:
        path.unlink()


def plain(file: str, add: Add, *, seed: int = 7) -> Workflow:
    return Variant(name=file, family=file, file=file, add=add).graph(cfg=3.0, seed=seed, steps=2)


def with_controlnet(graph: Workflow, class_type: str, **inputs: Any) -> Workflow:
    """The graph with a ControlNet on both prompts; its picture is of another size than the latent."""
    sides = {side: graph["sampler"]["inputs"][side] for side in ("positive", "negative")}
    given = {"image": picture(graph, "hint", width=96, height=64), "strength": 0.9}
    inputs |= given | {"start_percent": 0.0, "end_percent": 1.0}
    through(graph, "control", class_type, "positive", "negative", **sides, **inputs)
    return graph


def latent(name: str = "sd35_y.safetensors") -> Workflow:
    """A latent ControlNet: SD3.5's."""
    graph = plain(SD3.name, picture_of(SD3_TEXT, pooled=SD3_POOLED))
    graph["controlnet"] = node("ControlNetLoader", control_net_name=name)
    vae = encoder(graph, temporal=0)
    return with_controlnet(graph, "ControlNetApplyAdvanced", control_net=["controlnet", 0], vae=vae)


def inpainting() -> Workflow:
    """InstantX's inpainting ControlNet."""
    graph = plain(FILES[0].name, picture_of(TEXT))
    graph["controlnet"] = node("RandomInpaintingControlNet")
    hole = picture(graph, "hole", width=96, height=64)
    graph["mask"] = node("ImageToMask", image=hole, channel="red")
    given = {"control_net": ["controlnet", 0], "vae": encoder(graph), "mask": ["mask", 0]}
    return with_controlnet(graph, "ControlNetInpaintingAliMamaApply", **given)


def patched(file: str, family: str, class_type: str, temporal: int) -> Workflow:
    """A ControlNet between the blocks, its picture of another size than the latent."""
    graph = plain(file, picture_of(TEXT))
    graph["patch"] = node("RandomModelPatch", family=f"small {family}")
    inputs = {"model_patch": ["patch", 0], "image": picture(graph, "hint", width=96, height=64)}
    inputs |= {"vae": encoder(graph, temporal=temporal), "strength": 0.9}
    return between(graph, "diffsynth", class_type, **inputs)


KINDS: dict[str, Callable[[], Workflow]] = {
    "latent": latent,
    "inpainting": inpainting,
    "diffsynth": lambda: patched(FILES[0].name, "qwen-image", "QwenImageDiffsynthControlnet", 4),
    "z-image fun": lambda: patched(FILES[1].name, "z-image", "ZImageFunControlnet", 0),
}


def test_a_controlnet_for_another_model_is_refused_before_a_step(hosted_client: ComfyClient) -> None:
    graph = KINDS["diffsynth"]() | {name: node for name, node in small().items() if name not in ("sampler", "save")}
    result = hosted_client.queue(ours(graph))
    first_line = result.error_line("KSampler")
    assert "DiffSynthCnetPatch is made for QwenImageTransformer2DModel, and this MODEL is a WanModel" in first_line
    assert "remove the node that adds it" in first_line


def without(graph: Workflow) -> Workflow:
    """The same graph with a ControlNet of no strength."""
    graph = copy.deepcopy(graph)
    graph["control" if "control" in graph else "diffsynth"]["inputs"]["strength"] = 0.0
    return graph


@pytest.mark.parametrize("kind", KINDS)
def test_a_controlnet_of_the_second_of_two_models_equals_stock(
    kind: str, hosted_client: ComfyClient, stock: Stock
) -> None:
    graph, before = KINDS[kind](), small("Wan", seed=80 + list(KINDS).index(kind))
    right, first = stock(graph), stock(before)
    assert relative_error(stock(without(graph)), right) > VISIBLE, "the ControlNet changes nothing"
    assert relative_error(latent_of(hosted_client, ours(before)), first) <= ROUNDING
    assert relative_error(latent_of(hosted_client, ours(graph)), right) <= ROUNDING
    alone = between(ours(graph), "alone", "SwitchOffExchange")
    assert relative_error(latent_of(hosted_client, alone), right) > VISIBLE, "ranks that exchange nothing pass"


@pytest.mark.parametrize("name", EMBEDDERS)
def test_what_sd35s_controlnets_copy_from_the_model_has_its_loras(
    name: str, hosted_client: ComfyClient, stock: Stock
) -> None:
    graph = latent(name)
    changed = with_loras(graph, (LORA, 0.7))
    right = stock(changed)
    assert relative_error(stock(graph), right) > VISIBLE
    assert relative_error(latent_of(hosted_client, parallel(graph, mode="manual", cfg=2)), stock(graph)) <= ROUNDING
    for mine in (ours(changed), parallelized(changed)):
        assert relative_error(latent_of(hosted_client, mine), right) <= ROUNDING


def test_a_controlnet_that_copies_what_a_file_has_quantised_is_refused(
    hosted_client: ComfyClient, family_models: Path
) -> None:
    folder = family_models / "diffusion_models"
    weights, layer = load_file(folder / SD3.name), "y_embedder.mlp.0"
    with safe_open(folder / SD3.name, framework="pt") as file:
        metadata = file.metadata()
    weights |= FORMATS["fp8 e4m3"].stored(layer, weights[f"{layer}.weight"])
    path = folder / "sd35_quantised.safetensors"
    save_file(weights, path, metadata=metadata)
    graph = ours(latent())
    graph["model"]["inputs"]["unet_name"] = path.name
    result = hosted_client.queue(graph)
    path.unlink()
    first_line = result.error_line("KSampler")
    assert "copies a weight of the model, y_embedder.mlp.0.weight, that is quantised" in first_line
    assert first_line.startswith("Apply ControlNet (node control): its ControlNet")
    assert "remove that node, or use a file of the model in bf16 or fp16" in first_line
