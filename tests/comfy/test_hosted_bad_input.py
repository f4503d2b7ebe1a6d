"""What a user can get wrong with a model of any family: one clear error on the right node, the next prompt right."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rounding import ROUNDING
from safetensors.torch import load_file, save_file

from families.graphs import node
from families.variants import BY_NAME
from host import encoder_layouts
from host.client import ComfyClient, PromptRefusedError, Workflow
from host.pack_workflows import parallel, relative_error, saved_latent
from host.server import ComfyServer
from host.tiny_models import write_layout
from host.workflows import with_lora

WAN = BY_NAME["wan 2.1 t2v"]
DIFFUSERS = "names_of_diffusers.safetensors"
LORA = "tiny_lora_of_another_family.safetensors"
ULYSSES: dict[str, Any] = {"mode": "manual", "ulysses": 2}

# What is wrong with a file, and what the first line must say: the value, the limit, the remedy.
FILES = {
    "half.safetensors": ("half", "truncated", "download it again"),
    "encoder.safetensors": ("encoder", "recognises no diffusion model", "or update ComfyUI for a newer model"),
    "stub.safetensors": ("stub", "truncated", "again"),
    "text.safetensors": ("text", "not a safetensors file", "use"),
    "pickled.pt": ("pickled.pt", "only .safetensors", "convert"),
    "gguf.safetensors": ("gguf", "is a GGUF file", "use a .safetensors file"),
}


@pytest.fixture(scope="module", autouse=True)
def bad_files(family_models: Path) -> Iterator[None]:
    """Files among the models that cannot be used as they are, while this module's tests run."""
    folder = family_models / "diffusion_models"
    whole = (folder / WAN.file).read_bytes()
    (folder / "half.safetensors").write_bytes(whole[: len(whole) // 2])
    (folder / "stub.safetensors").write_bytes(whole[:100])
    (folder / "text.safetensors").write_bytes(b"this is a web page, not a model " * 64)
    (folder / "pickled.pt").write_bytes(b"\x80\x04.")
    (folder / "gguf.safetensors").write_bytes(b"GGUF\x03\0\0\0" + bytes(64))
    (folder / "model.gguf").write_bytes(b"GGUF\x03\0\0\0" + bytes(64))
    write_layout(folder / "encoder.safetensors", encoder_layouts.t5(64), seed=91)
    (family_models / "loras").mkdir(exist_ok=True)
    weights = {"lora_A.weight": torch.ones(4, 64), "lora_B.weight": torch.ones(64, 4)}
    names = {f"diffusion_model.transformer_blocks.0.attn.to_q.{name}": each for name, each in weights.items()}
    save_file(names, family_models / "loras" / LORA)
    yield
    for name in (*FILES, "model.gguf"):
        (folder / name).unlink()
    (family_models / "loras" / LORA).unlink()


@pytest.fixture(scope="module")
def right(hosted_server: ComfyServer) -> torch.Tensor:
    """What stock ComfyUI makes of the graph: what the prompt after a mistake must give."""
    client = ComfyClient(hosted_server.url)
    return saved_latent(client, client.queue(WAN.graph(steps=2)))


def ours(graph: Workflow, **plan: Any) -> Workflow:
    return parallel(graph, loader="ParallelModelLoader", **plan)


def generations(client: ComfyClient) -> list[int]:
    """Which workers there are: each error in one of them costs all, and makes the next ones' number another."""
    return [pool["generation"] for pool in client.get("/parallel_dit/state")["pools"]]


def first_line(client: ComfyClient, graph: Workflow, node_type: str, error_type: str = "ValueError") -> str:
    result = client.queue(graph)
    assert (result.status, result.error_node) == ("error", node_type), result.error_message
    assert result.error_type.rpartition(".")[2] == error_type
    return result.error_message.splitlines()[0]


def assert_says(said: str, *parts: str) -> None:
    assert [part for part in parts if part not in said] == [], said


def assert_the_next_prompt_is_right(client: ComfyClient, right: torch.Tensor) -> None:
    """The good graph equals stock, run anew."""
    graph = ours(WAN.graph(steps=2), **ULYSSES)
    graph["sampler"]["inputs"]["denoise"] = next(DENOISE)
    assert relative_error(saved_latent(client, client.queue(graph)), right) <= ROUNDING


DENOISE = iter(1 - step * 1e-9 for step in range(1000))  # another cache key for ComfyUI, the same sigmas


def test_a_bad_file_is_told_by_the_loader_and_an_object_in_a_conditioning_by_its_place_and_workers_stay(
    hosted_client: ComfyClient, right: torch.Tensor
) -> None:
    """Mistakes that cost no worker anything: the same make the next prompt right."""
    assert_the_next_prompt_is_right(hosted_client, right)
    before = generations(hosted_client)
    for file, parts in FILES.items():
        graph = ours(WAN.graph(), **ULYSSES)
        graph["model"]["inputs"]["unet_name"] = file
        assert_says(first_line(hosted_client, graph, "ParallelModelLoader"), *parts)
        assert generations(hosted_client) == before != [], file
    graph = ours(WAN.graph(), **ULYSSES)
    graph["object"] = node("ObjectInConditioning", conditioning=graph["sampler"]["inputs"]["positive"])
    graph["sampler"]["inputs"]["positive"] = ["object", 0]
    parts = ("WanModel.kwargs.adapter", "Identity", "only tensors and plain values", "remove the node that adds it")
    assert_says(first_line(hosted_client, graph, "KSampler"), *parts)
    assert generations(hosted_client) == before
    assert_the_next_prompt_is_right(hosted_client, right)


def test_a_latent_of_another_models_vae_is_told_by_its_channels_and_workers_stay(
    hosted_client: ComfyClient, right: torch.Tensor
) -> None:
    assert_the_next_prompt_is_right(hosted_client, right)
    before = generations(hosted_client)
    for name, kind, shape in (("wan 2.1 t2v", "WanModel", "1 4 3 8 12"), ("flux.1 t2i", "Flux", "1 48 8 12")):
        graph = ours(BY_NAME[name].graph(steps=2), **ULYSSES)
        graph["other"] = node("RandomLatent", shape=shape)
        graph["sampler"]["inputs"]["latent_image"] = ["other", 0]
        said = first_line(hosted_client, graph, "KSampler")
        assert_says(said, f"the latent has {shape.split()[1]} channels, {kind} takes 16", "use the VAE", "torch says: ")
        assert generations(hosted_client) == before != []
    assert_the_next_prompt_is_right(hosted_client, right)


def test_a_file_with_diffusers_names_is_refused_and_what_save_model_makes_of_it_runs(
    hosted_client: ComfyClient, hosted_server: ComfyServer, family_models: Path
) -> None:
    """Stock joins its queries, keys and values when it loads it."""
    from parallel_runtime.trials.flux_in_diffusers import to_diffusers  # 4 s, which collecting tests need not wait

    flux, folder = BY_NAME["flux.1 t2i"], family_models / "diffusion_models"
    save_file(to_diffusers(load_file(folder / flux.file)), folder / DIFFUSERS)
    graph = flux.graph(steps=2)
    graph["model"]["inputs"]["unet_name"] = DIFFUSERS
    stock = saved_latent(hosted_client, hosted_client.queue(graph))
    assert relative_error(stock, saved_latent(hosted_client, hosted_client.queue(flux.graph(steps=2)))) <= ROUNDING
    said = first_line(hosted_client, ours(graph, **ULYSSES), "ParallelModelLoader")
    assert_says(said, DIFFUSERS, "as diffusers does", "Load Diffusion Model, then Save Model")
    prefix = {"filename_prefix": "diffusion_models/of_diffusers"}
    hosted_client.queue({"model": graph["model"], "save": node("ModelSave", model=["model", 0], **prefix)})
    (made,) = (hosted_server.output / "diffusion_models").iterdir()
    graph["model"]["inputs"]["unet_name"] = made.name
    mine = saved_latent(hosted_client, hosted_client.queue(ours(graph, mode="manual", ring=2)))  # of 3 heads
    assert relative_error(mine, stock) <= ROUNDING
    (folder / DIFFUSERS).unlink()
    made.unlink()


def test_a_gguf_file_by_its_own_name_is_in_no_list(hosted_client: ComfyClient) -> None:
    graph = ours(WAN.graph(), **ULYSSES)
    graph["model"]["inputs"]["unet_name"] = "model.gguf"
    with pytest.raises(PromptRefusedError, match=r"ParallelModelLoader.*not in list.*model\.gguf"):
        hosted_client.queue(graph)


def test_a_lora_of_another_family_changes_nothing_there_as_here(
    hosted_client: ComfyClient, hosted_server: ComfyServer, right: torch.Tensor
) -> None:
    """ComfyUI takes what fits of a LoRA, and says in its log what does not."""
    for graph in (WAN.graph(steps=2), ours(WAN.graph(steps=2), **ULYSSES)):
        changed = with_lora(graph, LORA)
        said = hosted_server.log.count("lora key not loaded")
        assert relative_error(saved_latent(hosted_client, hosted_client.queue(changed)), right) <= ROUNDING
        assert hosted_server.log.count("lora key not loaded") > said
