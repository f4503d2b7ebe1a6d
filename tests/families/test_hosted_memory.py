"""A model that ComfyUI's modules compute is a good guest: little memory, freed, cancelled, killed, two in turn."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from comfy.test_nodes_memory import loading, soon, weights_left
from safetensors import safe_open
from safetensors.torch import save_file

from host.client import ComfyClient, Event, Workflow
from host.layouts import Row
from host.pack_workflows import TOLERANCE, latent_of, relative_error, saved_latent
from host.quantised import quantised
from host.server import ComfyServer
from host.tiny_models import make_tensor, to_bytes, write_layout
from host.workers import private_bytes, worker_pids, workers

from .comfy_classes import shapes_of
from .conftest import Stock
from .hosted import WAN, ours, small
from .wan import wan_file

SIZES = {"dim": 640, "ffn_dim": 2560, "num_layers": 12, "freq_dim": 256}
LARGE = wan_file("large", "t2v", heads=5, seed=50, **SIZES)
LONG = 400  # steps, of which all but a few are cancelled, however quick the machine is


@pytest.fixture(scope="module")
def large(family_models: Path) -> Iterator[Path]:
    """A Wan file of 330 MB whose blocks all repeat the first."""
    made: dict[str, bytes] = {}

    def values_of(row: Row) -> bytes:
        row = replace(row, name=re.sub(r"blocks\.\d+\.", "blocks.0.", row.name))
        if row.name not in made:
            made[row.name] = to_bytes(make_tensor(row, seed=LARGE.seed))
        return made[row.name]

    path = family_models / "diffusion_models" / LARGE.name
    shapes = shapes_of({LARGE.name: (LARGE.class_path, LARGE.arguments)})[LARGE.name]
    write_layout(path, LARGE.rows(shapes), seed=LARGE.seed, metadata=LARGE.metadata, values_of=values_of)
    yield path
    path.unlink()


def of_file(file: Path, *, seed: int, steps: int = 1, weight_dtype: str = "default") -> Workflow:
    graph = small(seed=seed, steps=steps)
    graph["model"]["inputs"]["unet_name"] = file.name
    return ours(graph, weight_dtype=weight_dtype)


def anonymous_bytes(server: ComfyServer) -> list[int]:
    """Each rank's memory that no file stands for."""
    texts = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in worker_pids(server)]
    return [int(re.search(r"^Anonymous:\s+(\d+) kB", text, re.MULTILINE)[1]) * 1024 for text in texts]


@pytest.mark.parametrize("weight_dtype", ["default", pytest.param("bfloat16", marks=pytest.mark.full)])
def test_replicated_weights_stay_in_the_files_own_pages(
    weight_dtype: str, hosted_client: ComfyClient, hosted_server: ComfyServer, large: Path
) -> None:
    latent_of(hosted_client, ours(small(seed=60, steps=1)))  # ComfyUI is imported, buffers are there
    before = anonymous_bytes(hosted_server)
    latent_of(hosted_client, of_file(large, seed=60, weight_dtype=weight_dtype))
    grown = [now - then for now, then in zip(anonymous_bytes(hosted_server), before, strict=True)]
    assert max(grown) < 150 * 2**20, grown
    assert large.stat().st_size > 300e6


@pytest.mark.full
@pytest.mark.parametrize("kind", ["nvfp4", "int8, rotated"])
def test_quantised_weights_stay_in_the_files_own_pages(
    kind: str, hosted_client: ComfyClient, hosted_server: ComfyServer, large: Path
) -> None:
    """Of further such files: of the first one the heap keeps what a product needs beside the weights.

    Of tensors by themselves models/test_quantised.py says that; here is the whole of a rank, after a call.
    """
    with safe_open(large, framework="pt") as file:
        tensors, said = quantised({name: file.get_tensor(name) for name in file.keys()}, kind)
        said |= file.metadata() or {}
    held, paths = [], [large.with_name(f"large_quantised_{number}.safetensors") for number in range(3)]
    for path in paths:
        save_file(tensors, path, metadata=said)
        latent_of(hosted_client, of_file(path, seed=60))
        held.append(anonymous_bytes(hosted_server))
    size = paths[0].stat().st_size
    for path in paths:
        path.unlink()
    grown = [now - then for now, then in zip(held[-1], held[0], strict=True)]
    assert max(grown) < size / 2, (held, size)  # two more files


def test_a_rank_with_sharded_weights_grows_by_its_share_and_two_blocks(
    hosted_client: ComfyClient, hosted_server: ComfyServer, large: Path
) -> None:
    latent_of(hosted_client, ours(small(seed=68, steps=1)))
    before = anonymous_bytes(hosted_server)
    graph = of_file(large, seed=68)
    graph["config"]["inputs"]["weights"] = "sharded"
    latent_of(hosted_client, graph)
    grown = [now - then for now, then in zip(anonymous_bytes(hosted_server), before, strict=True)]
    size = large.stat().st_size
    assert max(grown) < size / 2 + 2 * size / SIZES["num_layers"] + 150 * 2**20, grown


def test_free_empties_the_workers_and_the_next_prompt_loads_again(
    hosted_client: ComfyClient, hosted_server: ComfyServer, large: Path
) -> None:
    graph = of_file(large, seed=61)
    graph["config"]["inputs"]["weights"] = "sharded"  # or they are the file's own pages
    before = latent_of(hosted_client, graph)
    held, pids = private_bytes(hosted_server), worker_pids(hosted_server)
    hosted_client.free()
    assert soon(lambda: weights_left(hosted_server, held))
    result = hosted_client.queue(graph).require_success()
    assert loading(result), "the weights were not loaded again"
    assert torch.equal(saved_latent(hosted_client, result), before)
    assert worker_pids(hosted_server) == pids


@pytest.mark.full
def test_two_models_in_turn_do_not_grow(hosted_client: ComfyClient, hosted_server: ComfyServer, large: Path) -> None:
    files = (large, large.with_name(WAN.file))
    held = []
    for turn in range(4):
        for file in files:
            latent_of(hosted_client, of_file(file, seed=70 + turn, weight_dtype="bfloat16"))
        held.append(anonymous_bytes(hosted_server))
    grown = [now - then for now, then in zip(held[-1], held[1], strict=True)]
    assert max(grown) < 20e6, held


def test_cancel_within_a_step_keeps_the_workers_and_the_next_prompt_right(
    hosted_client: ComfyClient, hosted_server: ComfyServer, stock: Stock
) -> None:
    latent_of(hosted_client, ours(small(seed=62)))
    pids = worker_pids(hosted_server)

    def cancel(event: Event) -> None:
        if event.type == "progress" and event.data["value"] == 2:
            hosted_client.interrupt()

    result = hosted_client.queue(ours(small(seed=63, steps=LONG)), on_event=cancel)
    assert result.status == "interrupted"
    assert 2 <= result.progress[-1].value < LONG
    assert relative_error(latent_of(hosted_client, ours(small(seed=64))), stock(small(seed=64))) <= TOLERANCE
    assert worker_pids(hosted_server) == pids


def test_a_killed_rank_is_one_clear_error_and_the_next_prompt_is_right(
    hosted_client: ComfyClient, hosted_server: ComfyServer, stock: Stock
) -> None:
    latent_of(hosted_client, ours(small(seed=65)))

    def kill(event: Event) -> None:
        if event.type == "progress" and event.data["value"] == 2:
            workers(hosted_server)[1].kill()

    result = hosted_client.queue(ours(small(seed=66, steps=LONG)), on_event=kill)
    assert (result.status, result.error_node) == ("error", "KSampler")
    first_line = result.error_message.splitlines()[0]
    assert "rank 1" in first_line and "SIGKILL" in first_line
    assert relative_error(latent_of(hosted_client, ours(small(seed=67))), stock(small(seed=67))) <= TOLERANCE
