"""Cancel: the prompt ends as interrupted, the workers stay, and the next prompt is right."""

import threading
import time
from pathlib import Path

import pytest
from rounding import ROUNDING

from host import workflows
from host.client import ComfyClient, Event, PromptResult, Workflow
from host.pack_workflows import latent_of, parallel, relative_error, to_latent
from host.server import ComfyServer
from host.tiny_models import TinyModels
from host.workers import worker_pids
from parity.runner import RELEASE

STEPS = 12
AT_STEP = 3


def cancelled(client: ComfyClient, graph: Workflow, gate: Path) -> PromptResult:
    """Run `graph` and press Cancel when its sampler has told of a step; the next one waits until that has come."""
    for step in range(AT_STEP + 1):
        gate.with_suffix(f".{step}").touch()

    def on_event(event: Event) -> None:
        if event.type == "progress" and event.data["value"] == AT_STEP:
            client.interrupt()
            gate.touch()

    graph = workflows.between(graph, "hold", "HoldSteps", gate=str(gate), heeds_cancel=False)
    return client.queue(to_latent(graph), on_event=on_event)


@pytest.mark.parametrize(
    ("sampler", "loop", "in_ranks"),
    [("KSampler", "host", False), ("KSampler", "auto", True), ("ParallelFluxSampler", "auto", True)],
)
def test_cancel_in_the_middle_of_sampling_keeps_the_workers_and_the_next_prompt_right(
    sampler: str,
    loop: str,
    in_ranks: bool,
    client: ComfyClient,
    comfy_server: ComfyServer,
    tiny_models: TinyModels,
    tmp_path: Path,
) -> None:
    graph = workflows.text_to_image(tiny_models, seed=51)
    right = latent_of(client, graph)
    latent_of(client, parallel(graph, sampler=sampler, loop=loop))
    pids = worker_pids(comfy_server)
    long = parallel(workflows.text_to_image(tiny_models, steps=STEPS, seed=52), sampler=sampler, loop=loop)
    result = cancelled(client, long, tmp_path / "gate")
    assert result.status == "interrupted"
    assert AT_STEP <= result.progress[-1].value < STEPS
    told = [text for node, text in result.texts if node == "sampler" and text.startswith("step ")]
    assert told and all(("skew" in text) != in_ranks for text in told), told  # which each request of ComfyUI's loop has
    again = workflows.text_to_image(tiny_models, seed=51)
    again["positive"]["inputs"]["text"] += " "  # another text, same tokens: nothing comes from a cache
    assert relative_error(latent_of(client, parallel(again, sampler=sampler, loop=loop)), right) <= ROUNDING
    assert worker_pids(comfy_server) == pids


def test_cancel_while_workers_start_leaves_a_server_that_samples(
    client: ComfyClient, comfy_server: ComfyServer, tiny_models: TinyModels
) -> None:
    graph = workflows.text_to_image(tiny_models, seed=60)
    right = latent_of(client, graph)
    client.queue(RELEASE).require_success()
    assert worker_pids(comfy_server) == []

    def interrupt_the_start() -> None:
        until = time.monotonic() + 300
        while not worker_pids(comfy_server):  # the first has just been started: importing torch alone takes it longer
            assert time.monotonic() < until, "no worker was started"
            time.sleep(0.01)
        client.interrupt()

    interrupting = threading.Thread(target=interrupt_the_start)

    def on_event(event: Event) -> None:
        if event.type == "executing" and event.data["node"] == "sampler":
            interrupting.start()

    result = client.queue(to_latent(parallel(graph)), on_event=on_event)
    interrupting.join()
    assert (result.status, result.progress) == ("interrupted", [])
    assert relative_error(latent_of(client, parallel(graph)), right) <= ROUNDING
    assert len(worker_pids(comfy_server)) == 2
