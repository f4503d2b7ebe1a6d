"""Timed VAE Decode over ranks: VAE Decode (Tiled) to the last digits, and VAE Decode with a note where it cannot be."""

import math
import os
import re
import signal
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rounding import ROUNDING

from families.variants import BY_NAME
from host.client import ComfyClient, Event, PromptResult, Workflow
from host.fetch import comfyui_path
from host.outcomes import StockFailsError
from host.pack_workflows import parallel
from host.server import ComfyServer
from host.workers import worker_pids

WAN = BY_NAME["wan 2.1 t2v"]
VISIBLE = 1e-3  # how far VAE Decode is off at least: else tiles could not be told from none
FULL = pytest.mark.full
# A VAE, a latent whose size tiles do not divide, and the pictures that it becomes.
CASES = [
    pytest.param("flux", "1 16 3 67", [1, 24, 536, 3], id="flux"),
    pytest.param("sdxl", "3 4 2 66", [3, 16, 528, 3], id="sdxl, three pictures"),
    pytest.param("ltx", "1 128 2 4 18", [9, 128, 576, 3], id="ltx"),
    pytest.param("wan 2.1", "1 16 1 8 72", [1, 64, 576, 3], id="wan 2.1, one frame"),
    pytest.param("flux.2", "1 128 4 37", [1, 64, 592, 3], id="flux.2", marks=FULL),
    pytest.param("wan 2.1", "1 16 18 3 66", [69, 24, 528, 3], id="wan 2.1, cut in time", marks=FULL),
    pytest.param("wan 2.2", "1 48 1 2 33", [1, 32, 528, 3], id="wan 2.2", marks=FULL),
    pytest.param("hunyuanvideo", "1 16 1 4 68", [1, 32, 544, 3], id="hunyuanvideo", marks=FULL),
    pytest.param("flux", "1 16 80 72", [1, 640, 576, 3], id="flux, tiles in both dims", marks=FULL),
]
# Tiles of a long strip: some seconds on any machine.
LONG = ("wan 2.1", "1 16 1 8 3000")


def test_models_make_room_for_a_vae_and_its_largest_tile_on_gpus_alone(module_of_pack, monkeypatch) -> None:
    decode, device = module_of_pack("nodes.host.vae.parallel_decode"), module_of_pack("parallel_runtime.devices").Device
    freed: list[tuple[int, str]] = []
    management = SimpleNamespace(free_memory=lambda *asked: freed.append(asked), get_torch_device=lambda: "here")
    monkeypatch.setattr(decode, "comfy", SimpleNamespace(model_management=management))
    vae = SimpleNamespace(vae_dtype="half", memory_used_decode=lambda shape, dtype: 100 * math.prod(shape))
    tiles = [SimpleNamespace(latent=torch.zeros(shape)) for shape in ((1, 2, 3), (1, 2, 5), (1, 2, 3))]
    weights = SimpleNamespace(tensors={"a": torch.zeros(3), "b": torch.zeros(5, dtype=torch.half)})
    decode._make_room(vae, tiles, weights, [device("cpu", 0), device("cpu", 1)])
    assert freed == []
    decode._make_room(vae, tiles, weights, [device("cuda", 0), device("cpu", 0)])
    assert freed == [(1000 + 12 + 10, "here")]


def decoded(kind: str, shape: str, *, seed: int = 3) -> Workflow:
    """The three decodes of a random latent, ours held against the others."""
    graph: Workflow = {
        "vae": {"class_type": "SmallVAE", "inputs": {"kind": kind}},
        "latent": {"class_type": "RandomLatent", "inputs": {"shape": shape, "seed": seed}},
        "config": {"class_type": "SPConfig", "inputs": {"mode": "auto", "devices": "cpu:2", "ulysses": 1, "ring": 1}},
    }
    both: dict[str, Any] = {"samples": ["latent", 0], "vae": ["vae", 0]}
    tiling = {"tile_size": 512, "overlap": 64, "temporal_size": 64, "temporal_overlap": 8}
    graph["decode"] = {"class_type": "TimedVAEDecode", "inputs": both | {"sp_config": ["config", 0]}}
    graph["tiled"] = {"class_type": "VAEDecodeTiled", "inputs": both | tiling}
    graph["plain"] = {"class_type": "VAEDecode", "inputs": dict(both)}
    for name in ("tiled", "plain"):
        inputs = {"image": ["decode", 0], "reference": [name, 0]}
        graph[f"{name} difference"] = {"class_type": "CompareImages", "inputs": inputs}
    return graph


def alone(graph: Workflow) -> Workflow:
    graph = {name: node for name, node in graph.items() if name in ("vae", "latent", "config", "decode")}
    return graph | {"seen": {"class_type": "PreviewImage", "inputs": {"images": ["decode", 0]}}}


def differences(result: PromptResult) -> tuple[float, float, list[int]]:
    """From VAE Decode (Tiled), from VAE Decode, and the shape of the pictures."""
    tiled, plain = (
        result.require_success().outputs[f"{name} difference"]["compared"][0] for name in ("tiled", "plain")
    )
    assert tiled["clamped"] < 0.5  # or there would be little to compare
    return tiled["error"], plain["error"], tiled["shape"]


@pytest.mark.parametrize(("kind", "shape", "pictures"), CASES)
def test_ranks_decode_what_tiled_decode_makes(
    kind: str, shape: str, pictures: list[int], hosted_client: ComfyClient
) -> None:
    result = hosted_client.queue(decoded(kind, shape))
    tiled, plain, found = differences(result)
    assert found == pictures
    assert tiled <= ROUNDING
    assert plain > VISIBLE
    report = result.report("decode")
    assert report["vae"]["device"] == "cpu:0, cpu:1"
    assert sum(report["vae"]["rank_tiles"]) == report["vae"]["tiles"] > 1
    assert min(report["vae"]["rank_tiles"]) > 0
    assert max(report["vae"]["rank_s"]) <= report["vae"]["decode_s"]
    assert "warnings" not in report
    assert "timings" not in report


def test_a_vae_is_loaded_once_and_leaves_the_workers_with_their_models(hosted_client: ComfyClient) -> None:
    graph = alone(decoded("wan 2.1", "1 16 1 8 66", seed=13))
    hosted_client.queue(
        parallel(WAN.graph(steps=1), loader="ParallelModelLoader", mode="manual", ulysses=2)
    ).require_success()
    hosted_client.queue(graph)
    graph["latent"]["inputs"]["seed"] = 14
    assert hosted_client.queue(graph).report("decode")["vae"]["load_s"] == 0.0
    hosted_client.free()
    graph["latent"]["inputs"]["seed"] = 15
    assert hosted_client.queue(graph).report("decode")["vae"]["load_s"] > 0.0


@pytest.mark.parametrize(
    ("kind", "shape", "reason"),
    [
        ("patched", "1 16 1 8 66", "a node has changed the weights or parts of WanVAE"),
        ("ltx, noise", "1 128 2 4 18", "it draws random numbers as it decodes, others for each tile"),
    ],
)
def test_what_ranks_cannot_decode_comfyui_decodes_and_says_why(
    kind: str, shape: str, reason: str, hosted_client: ComfyClient
) -> None:
    result = hosted_client.queue(decoded(kind, shape))
    _, plain, _ = differences(result)
    assert (plain <= ROUNDING) == (kind != "ltx, noise")  # which is another picture each time
    report = result.report("decode")
    assert report["warnings"] == [f"VAE Decode ran in ComfyUI, untiled: {reason}"]
    assert "tiles" not in report["vae"]
    assert any(reason in text for _, text in result.texts)


def test_in_the_middle_of_a_decode_cancel_keeps_the_workers_and_a_killed_rank_is_named_and_the_next_is_right(
    hosted_client: ComfyClient, hosted_server: ComfyServer
) -> None:
    short = decoded("wan 2.1", "1 16 1 8 72", seed=7)
    assert differences(hosted_client.queue(short))[0] <= ROUNDING
    pids = worker_pids(hosted_server)
    result = with_event(hosted_client, pids, alone(decoded(*LONG, seed=8)), hosted_client.interrupt)
    assert result.status == "interrupted"
    assert "decode" not in result.outputs
    short["latent"]["inputs"]["seed"] = 9
    assert differences(hosted_client.queue(short))[0] <= ROUNDING
    assert worker_pids(hosted_server) == pids

    result = with_event(hosted_client, pids, alone(decoded(*LONG, seed=11)), lambda: os.kill(pids[-1], signal.SIGKILL))
    assert "killed by SIGKILL; the next prompt starts fresh workers" in result.error_line("TimedVAEDecode")
    short["latent"]["inputs"]["seed"] = 12
    assert differences(hosted_client.queue(short))[0] <= ROUNDING
    assert not set(worker_pids(hosted_server)) & set(pids[-2:])


def with_event(client: ComfyClient, pids: list[int], graph: Workflow, act: Callable[[], object]) -> PromptResult:
    """Run `graph`, whose VAE the last two ranks have, and act as soon as one of them has told of a tile. The other is
    stopped until then, so that the decode cannot be done before."""
    under_way: list[str] = []

    def tell_other(number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(pids[-2], number)

    def on_event(event: Event) -> None:
        if event.type == "executing" and event.data["node"] == "decode":
            under_way.append("decode")
        elif event.type == "parallel_dit.text" and under_way == ["decode"]:
            if re.match(r"[1-9]\d* of ", event.data["text"]):
                under_way.append("acted")
                act()
                tell_other(signal.SIGCONT)

    tell_other(signal.SIGSTOP)
    try:
        return client.queue(graph, on_event=on_event)
    finally:
        tell_other(signal.SIGCONT)


@pytest.mark.parametrize(
    ("shape", "pictures", "tiles"),
    [
        pytest.param("1 24 1 18 10", [1, 288, 160, 3], 2, id="one frame"),
        pytest.param("1 24 4 18 10", [13, 288, 160, 3], 2, id="cut in space"),
        pytest.param("1 24 9 4 4", [30, 64, 64, 3], 2, id="cut in time", marks=FULL),
    ],
)
def test_a_class_that_tiles_by_itself_is_tiled_as_it_does(
    shape: str, pictures: list[int], tiles: int, hosted_client: ComfyClient
) -> None:
    """MiniMax H3's, in ComfyUI's process: ranks would build it at its real size, of 1.8 billion weights."""
    if not (comfyui_path() / "comfy" / "ldm" / "minimax").exists():
        raise StockFailsError("this ComfyUI has no MiniMax H3")
    graph = {
        "latent": {"class_type": "RandomLatent", "inputs": {"shape": shape, "seed": 3}},
        "here": {"class_type": "TileHere", "inputs": {"samples": ["latent", 0]}},
        "difference": {"class_type": "CompareImages", "inputs": {"image": ["here", 0], "reference": ["here", 1]}},
    }
    result = hosted_client.queue(graph).require_success()
    (found,) = result.outputs["difference"]["compared"]
    assert found["shape"] == pictures
    assert found["error"] <= ROUNDING
    assert len(result.outputs["here"]["tiles"]) == tiles
    assert all(tile[-2:] != [18, 10] for tile in result.outputs["here"]["tiles"])
