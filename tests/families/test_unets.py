"""U-Nets beside stock ComfyUI, in a real server: SDXL and SD1.5 as files and as checkpoints, with LoRA and ControlNet.

No ranks share an image of theirs: prompt and negative, and the images of a batch, are what they divide.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rounding import ROUNDING

from host.adapters import write_adapter
from host.client import ComfyClient, Workflow
from host.formats import allowed_by, stock_moves
from host.pack_workflows import latent_of, parallel, parallelized, relative_error, saved_latent

from .conftest import Stock
from .graphs import node, picture
from .hosted import VISIBLE, between, with_loras
from .unet import write_checkpoint, write_controlnet
from .variants import BY_NAME, write_families

KOALA = "sdxl koala"
CFG = 7.0
LORA, CHECKPOINT, CONTROLNET = "unet_lora.safetensors", "koala_v.safetensors", "unet_koala.safetensors"
# Of every file: attention on a way down, and what it goes through in the middle.
MODULES = {f"input_blocks.{number}.1.transformer_blocks.0.attn1.to_q": (320, 320) for number in (3, 5, 8)}
MODULES |= {"middle_block.1.transformer_blocks.0.ff.net.2": (320, 1280)}


@pytest.fixture(scope="module", autouse=True)
def files(family_models: Path) -> Iterator[None]:
    """A LoRA for all of them, and a ControlNet for KOALA."""
    lora = write_adapter(family_models / "loras" / LORA, "lora_alpha", MODULES)
    yield
    lora.unlink()
    for path in ("controlnet/" + CONTROLNET, "checkpoints/" + CHECKPOINT):
        (family_models / path).unlink(missing_ok=True)


def small(*, steps: int = 2, cfg: float = CFG) -> Workflow:
    """A stock graph at cfg 7."""
    return BY_NAME[KOALA].graph(cfg=cfg, steps=steps)


def controlled(graph: Workflow) -> Workflow:
    """With the ControlNet on both prompts."""
    graph["controlnet"] = node("ControlNetLoader", control_net_name=CONTROLNET)
    sampler = graph["sampler"]["inputs"]
    inputs = {side: sampler[side] for side in ("positive", "negative")} | {"control_net": ["controlnet", 0]}
    inputs |= {"image": picture(graph, "hint"), "strength": 0.9, "start_percent": 0.0, "end_percent": 1.0}
    graph["control"] = node("ControlNetApplyAdvanced", **inputs)
    sampler["positive"], sampler["negative"] = ["control", 0], ["control", 1]
    return graph


def ours(graph: Workflow, **more: Any) -> Workflow:
    """The same graph with our loader, whose batch groups have a side of cfg each."""
    return parallel(graph, mode="manual", loader="ParallelModelLoader", cfg=2, **more)


def wrong(graph: Workflow) -> Workflow:
    """The same graph of ours, whose ranks all run the first row of a batch."""
    return between(graph, "wrong", "SwitchOffExchange", rows=True)


def test_sdxl_at_cfg_7_with_lora_and_controlnet_on_two_ranks_equals_stock(
    hosted_client: ComfyClient, stock: Stock, family_models: Path
) -> None:
    file = family_models / "diffusion_models" / BY_NAME[KOALA].file
    write_controlnet(family_models / "controlnet" / CONTROLNET, file)
    graph = with_loras(controlled(small()), (LORA, 0.8))
    right = stock(graph)
    assert relative_error(stock(small()), right) > VISIBLE
    mine = ours(graph, weights="sharded")
    mine["sampler"]["class_type"] = "ParallelSampler"
    result = hosted_client.queue(mine)
    assert relative_error(saved_latent(hosted_client, result), right) <= ROUNDING
    size = file.stat().st_size
    for rank in result.report()["ranks"]:
        sent = rank["weight_bytes"][-1]  # its half of the blocks, once: it runs its own row and not the other's too
        assert 0.4 * size < sent < 0.6 * size, sent / size
    assert relative_error(latent_of(hosted_client, wrong(mine)), right) > VISIBLE


# Files of published widths, of 0.5 to 5 GB: SDXL's relatives, what predicts v, what sees a picture, frames of a video.
LARGE = ("sd1.5", "sdxl", "sd2, v", "sd2.1 unclip", "ssd-1b", "segmind vega", "sdxl refiner", "svd")


@pytest.mark.full
@pytest.mark.parametrize("name", LARGE)
def test_a_unet_of_published_width_equals_stock(
    name: str, hosted_client: ComfyClient, stock: Stock, family_models: Path
) -> None:
    write_families(family_models, only=[name])
    graph = BY_NAME[name].graph(cfg=CFG if name != "svd" else 2.5, steps=2)
    right, mine = stock(graph), ours(graph, weights="sharded")
    error = relative_error(latent_of(hosted_client, mine), right)
    assert error <= ROUNDING or error <= allowed_by(stock_moves(hosted_client, graph, right), least=ROUNDING)
    assert relative_error(latent_of(hosted_client, wrong(mine)), right) > VISIBLE
    if name == "sd2, v":  # what it predicts is read from a weight
        eps = between(graph, "eps", "ModelSamplingDiscrete", sampling="eps", zsnr=False)
        assert relative_error(stock(eps), right) > VISIBLE


def test_a_checkpoint_that_predicts_v_equals_stock(
    hosted_client: ComfyClient, stock: Stock, family_models: Path
) -> None:
    """Load Checkpoint, a LoRA, Parallelize Model. That it predicts v, the file says beside its U-Net."""
    path, file = family_models / "checkpoints" / CHECKPOINT, BY_NAME[KOALA].file
    if not path.exists():
        write_checkpoint(path, family_models / "diffusion_models" / file, v_pred=torch.zeros(0))
    plain = with_loras(small(cfg=3.0), (LORA, 0.8))
    graph = plain | {"model": node("CheckpointLoaderSimple", ckpt_name=CHECKPOINT)}
    right = stock(graph)
    assert relative_error(stock(plain), right) > VISIBLE, "the file does not say it"
    mine = parallelized(graph, source="lora 0", weights="sharded")
    assert relative_error(latent_of(hosted_client, mine), right) <= ROUNDING


def test_ranks_that_are_to_share_an_image_are_refused_with_what_works(hosted_client: ComfyClient) -> None:
    result = hosted_client.queue(ours(small(), ulysses=2, devices="cpu:4"))
    said = result.error_line("ParallelModelLoader")
    for part in ("=2", "cannot share an image of UNetModel", "ulysses=1 and ring=1", "cfg=2", "data=2"):
        assert part in said, said


# Stock nodes whose code runs in ComfyUI's process between the blocks of a U-Net, and what their refusal names.
PATCHERS: dict[str, tuple[dict[str, Any], str, str]] = {
    "FreeU_V2": ({"b1": 1.3, "b2": 1.4, "s1": 0.9, "s2": 0.2}, "FreeU_V2 (node patch)", "output_block_patch"),
    "PerturbedAttentionGuidance": ({"scale": 3.0}, "PerturbedAttentionGuidance (node patch)", "attn1 of middle 0"),
}


@pytest.mark.parametrize("node_type", PATCHERS)
def test_a_node_whose_code_runs_between_the_blocks_is_refused_by_its_name(
    node_type: str, hosted_client: ComfyClient
) -> None:
    inputs, name, what = PATCHERS[node_type]

    def patched(graph: Workflow) -> Workflow:
        return between(graph, "patch", node_type, **inputs)

    for mine, places in (
        (patched(ours(small())), {node_type, "KSampler"}),
        (parallelized(patched(small()), source="patch", mode="manual", cfg=2), {"ParallelizeModel", "KSampler"}),
    ):
        result = hosted_client.queue(mine)
        assert result.status == "error" and result.error_node in places, result.error_message
        said = result.error_message.splitlines()[0]
        assert what in said and "remove" in said, said
        assert name in said, said
