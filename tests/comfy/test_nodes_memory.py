"""Memory and lifetime: ComfyUI's manager frees and reloads the workers' weights, Release ends the workers.

Weights are sharded: replicated ones on the CPU stay in the file's own pages, shards are each rank's private memory.
"""

import time
from collections.abc import Callable, Iterator

import pytest
import torch

from host import workflows
from host.client import ComfyClient, PromptResult, Workflow
from host.pack_workflows import parallel, saved_latent, to_latent
from host.server import ComfyServer
from host.tiny_models import TinyModels, write_flux
from host.workers import private_bytes, worker_pids, workers
from parity.runner import RELEASE

HEAVY = "heavy.safetensors"
HALF_A_MODEL = 28e6  # bytes: each rank has 57 MB of that file's weights, the allocator keeps some freed pages


@pytest.fixture(scope="module", autouse=True)
def heavy(tiny_models: TinyModels) -> Iterator[None]:
    """A file of four times the tiny ones' weights."""
    path = write_flux(tiny_models.diffusion_model(HEAVY), hidden=512)
    yield
    path.unlink()


@pytest.fixture(autouse=True)
def no_workers(client: ComfyClient) -> None:
    """Each test starts without workers."""
    client.queue(RELEASE).require_success()


def sharded(tiny: TinyModels, *, seed: int, steps: int = 2) -> Workflow:
    """A small graph whose weights are private memory of each rank."""
    graph = workflows.text_to_image(tiny, seed=seed, steps=steps, width=128, height=128)
    graph["model"]["inputs"]["unet_name"] = HEAVY
    return parallel(graph, weights="sharded")


def run(client: ComfyClient, graph: Workflow) -> PromptResult:
    """Run up to the latent; it must succeed."""
    return client.queue(to_latent(graph)).require_success()


def loading(result: PromptResult) -> list[tuple[str, str]]:
    """The texts about loading, by the node they were drawn on; others tell of plans."""
    return [(node, text) for node, text in result.texts if "orkers" in text or text.startswith("Loading")]


def pool_states(client: ComfyClient) -> list[str]:
    return [pool["state"] for pool in client.get("/parallel_dit/state")["pools"]]


def less_than(before: list[int], server: ComfyServer) -> list[int]:
    """Bytes that each rank holds less than `before`."""
    return [then - now for then, now in zip(before, private_bytes(server), strict=True)]


def soon(happened: Callable[[], bool], *, within_s: float = 300.0) -> bool:
    """Whether it happens in time; ComfyUI frees when it next looks at its queue."""
    until = time.monotonic() + within_s
    while not happened():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def test_weights_are_loaded_once_and_another_plan_or_an_edited_graph_finds_them_there(
    client: ComfyClient, comfy_server: ComfyServer, tiny_models: TinyModels
) -> None:
    assert loading(run(client, sharded(tiny_models, seed=82))), "loading is not told on the node"
    again = run(client, sharded(tiny_models, seed=82))
    assert set(again.cached) == set(sharded(tiny_models, seed=82)) - {"vae", "decode"}, "which no latent needs"
    held, pids = private_bytes(comfy_server), worker_pids(comfy_server)
    ring = sharded(tiny_models, seed=82)
    ring["config"]["inputs"] |= {"mode": "manual", "ring": 2}
    assert loading(run(client, ring)) == []
    run(client, workflows.text_to_image(tiny_models, width=128, height=128))
    result = run(client, sharded(tiny_models, seed=83))
    assert "model" not in result.cached, "ComfyUI kept the MODEL, so this shows nothing"
    assert loading(result) == []
    assert worker_pids(comfy_server) == pids
    grown = [now - then for now, then in zip(private_bytes(comfy_server), held, strict=True)]
    assert max(grown) < HALF_A_MODEL, grown
    held = private_bytes(comfy_server)
    for seed, loads in ((84, True), (85, False)):
        unequal = sharded(tiny_models, seed=seed)
        unequal["config"]["inputs"]["shares"] = "1, 3"
        assert bool(loading(run(client, unequal))) == loads, "other numbers cut the weights anew, once"
    grown = [now - then for now, then in zip(private_bytes(comfy_server), held, strict=True)]
    assert grown[1] - grown[0] > HALF_A_MODEL, grown
    assert loading(run(client, sharded(tiny_models, seed=86))) and worker_pids(comfy_server) == pids
    held = private_bytes(comfy_server)
    run(client, workflows.text_to_image(tiny_models, seed=87, width=128, height=128))
    client.free()
    assert soon(lambda: min(less_than(held, comfy_server)) > HALF_A_MODEL, within_s=60), "of a MODEL that is gone"


def test_weights_are_back_after_free_ranks_after_release_and_after_one_of_them_was_killed(
    client: ComfyClient, comfy_server: ComfyServer, tiny_models: TinyModels
) -> None:
    before = saved_latent(client, run(client, sharded(tiny_models, seed=63)))
    loaded, pids = private_bytes(comfy_server), worker_pids(comfy_server)
    client.free()
    assert soon(lambda: min(less_than(loaded, comfy_server)) > HALF_A_MODEL), "every rank holds less by about a model"
    result = run(client, sharded(tiny_models, seed=63))
    assert loading(result), "the weights were not loaded again"
    assert torch.equal(saved_latent(client, result), before)
    assert len(pids) == 2 and worker_pids(comfy_server) == pids
    graph = to_latent(sharded(tiny_models, seed=63))
    graph["release"] = {"class_type": "ReleaseParallelPool", "inputs": {"anything": ["sampler", 0]}}
    graph["save"]["inputs"]["samples"] = ["release", 0]
    assert torch.equal(saved_latent(client, client.queue(graph)), before), "it passes its input on"
    assert worker_pids(comfy_server) == []
    assert "sampler" in client.queue(graph).require_success().cached, "a released pool is no reason to sample again"
    client.free()
    assert torch.equal(saved_latent(client, run(client, sharded(tiny_models, seed=63))), before)
    first, second = workers(comfy_server)
    assert {first.pid, second.pid}.isdisjoint(pids)
    second.kill()
    assert soon(lambda: worker_pids(comfy_server) == []), "the other rank outlived the dead one"
    assert soon(lambda: "failed" in pool_states(client)), pool_states(client)  # a moment after the last has ended
    result = run(client, sharded(tiny_models, seed=63))
    assert "model" not in result.cached, "a MODEL of lost workers came from the cache"
    assert torch.equal(saved_latent(client, result), before)
    assert first.pid not in worker_pids(comfy_server)
