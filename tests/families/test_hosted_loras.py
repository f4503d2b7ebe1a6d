"""LoRA and its relatives beside stock: each kind, stacked, taken back, one that widens a layer, two models at once."""

import copy
from pathlib import Path

import pytest
import torch
from rounding import ROUNDING
from safetensors.torch import save_file

from host.adapters import KINDS, noise, write_adapter
from host.client import ComfyClient
from host.pack_workflows import latent_of, relative_error
from parity.edits import HERE, custom_sampling

from .conftest import Stock
from .graphs import node
from .hosted import VISIBLE, ours, small, with_loras
from .variants import BY_NAME

# One of each kind of stream.
MODULES = {"blocks.0.self_attn.q": (120, 120), "blocks.1.ffn.0": (240, 120), "blocks.2.cross_attn.v": (120, 120)}
# Each kind on a module of its own: where the others are right, only this one can be wrong.
PLACES = [f"blocks.{block}.{part}_attn.{name}" for block in range(3) for part in ("self", "cross") for name in "qkvo"]


@pytest.fixture(scope="session")
def loras(family_models: Path) -> Path:
    """The server's folder of LoRAs with a file of each kind for MODULES, and one for a place of its own."""
    folder = family_models / "loras"
    for kind, place in zip(KINDS, PLACES, strict=False):
        write_adapter(folder / file_of(kind), kind, MODULES)
        write_adapter(folder / file_of(kind, "alone"), kind, {place: (120, 120)})
    return folder


def file_of(kind: str, of: str = "wan") -> str:
    return f"{of}_{kind}.safetensors"


def test_every_kind_of_adapter_equals_stock(hosted_client: ComfyClient, stock: Stock, loras: Path) -> None:
    """All in one graph, each on another module; each alone moves stock's latent."""
    files = [(file_of(kind, "alone"), 0.8) for kind in KINDS]
    graph = with_loras(small(), *files)
    assert relative_error(latent_of(hosted_client, ours(graph)), stock(graph)) <= ROUNDING
    for file in files:
        assert relative_error(stock(with_loras(small(), file)), stock(small())) > 10 * ROUNDING, f"{file} does nothing"


def test_stacked_loras_equal_stock_and_are_taken_back_to_the_last_bit(
    hosted_client: ComfyClient, stock: Stock, loras: Path
) -> None:
    plain = latent_of(hosted_client, ours(small(seed=20)))
    for names, mode, strengths in (
        (("oft", "lora_alpha", "set"), "merged", (0.7, -0.4, 1.0)),
        (("lora_alpha", "diff", "oft"), "side branch", (-0.3, -0.4, 0.7)),  # the last is merged
    ):
        graph = with_loras(small(), *((file_of(each), by) for each, by in zip(names, strengths, strict=True)))
        assert relative_error(latent_of(hosted_client, ours(graph, lora=mode)), stock(graph)) <= ROUNDING
    again = ours(small(seed=20))
    again["sampler"]["inputs"]["denoise"] = 0.9999999  # another cache key in ComfyUI, the same sigmas
    assert torch.equal(latent_of(hosted_client, again), plain)


def test_a_lora_that_widens_the_first_layer_takes_what_lies_beside_the_latent(
    hosted_client: ComfyClient, stock: Stock, loras: Path
) -> None:
    """ComfyUI reads from the shape of that layer's weight what to put beside the latent."""
    down, shape = noise(4, 36, 1, 2, 2, scale=0.1), torch.tensor([120, 36, 1, 2, 2])
    tensors = {"lora_up.weight": noise(120, 4, scale=0.5), "lora_down.weight": down, "reshape_weight": shape}
    tensors = {f"diffusion_model.patch_embedding.{name}": each for name, each in tensors.items()}
    save_file(tensors, loras / "wider.safetensors")
    graph = BY_NAME["wan 2.2 i2v"].graph(cfg=3.0, steps=2)
    graph["model"] = small()["model"]
    wide = with_loras(graph, ("wider.safetensors", 1.0))
    assert relative_error(stock(graph), stock(wide)) > VISIBLE
    assert relative_error(latent_of(hosted_client, ours(wide)), stock(wide)) <= ROUNDING
    assert relative_error(latent_of(hosted_client, ours(graph)), stock(graph)) <= ROUNDING


def test_two_models_of_one_file_with_other_loras_are_refused_in_one_guider(
    hosted_client: ComfyClient, stock: Stock, loras: Path, family_models: Path
) -> None:
    """Of two loaders; stock loads the file twice then. What the message says to do equals that."""
    folder = family_models / "diffusion_models"
    last_sent = with_loras(small(), (file_of("lora_alpha"), 0.8))
    file = last_sent["model"]["inputs"]["unet_name"]
    if not (folder / "twin.safetensors").exists():
        (folder / "twin.safetensors").hardlink_to(folder / file)  # or the cache of nodes makes one loader of both
    last_sent["model b"] = node("UNETLoader", unet_name="twin.safetensors", weight_dtype="default")
    custom_sampling("DualModelGuider", positive=HERE, negative=HERE, cfg=HERE, model_negative=["model b", 0])(last_sent)
    graph = ours(last_sent, sampler="SamplerCustomAdvanced")
    assert relative_error(latent_of(hosted_client, graph), stock(last_sent)) <= ROUNDING, (
        "of another file nothing is shared"
    )
    graph["model b"] = copy.deepcopy(graph["model"])
    graph["config b"] = copy.deepcopy(graph["config"])
    graph["config b"]["inputs"]["lora"] = "side branch"
    graph["model b"]["inputs"]["sp_config"] = ["config b", 0]
    result = hosted_client.queue(graph)
    first_line = result.error_line("SamplerCustomAdvanced")
    assert f"two MODELs of {file} on the same workers" in first_line
    assert "use Load Diffusion Model for one of them" in first_line
    graph["model b"] = node("UNETLoader", unet_name=file, weight_dtype="default")
    assert relative_error(latent_of(hosted_client, graph), stock(last_sent)) <= ROUNDING
