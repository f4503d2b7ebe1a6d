"""SP Config's auto mode in a real server: the plan, and why it was taken, on the nodes and once in the log."""

from host import workflows
from host.client import ComfyClient
from host.pack_workflows import parallel, to_latent
from host.server import ComfyServer
from host.tiny_models import TinyModels

LOGGED = "SP Config: auto takes uly2: all 2 CPU ranks are used, as named"


def test_auto_says_on_both_nodes_and_once_in_the_log_why_it_took_its_plan(
    client: ComfyClient, comfy_server: ComfyServer, tiny_models: TinyModels
) -> None:
    before = comfy_server.log.count(LOGGED)
    stock = workflows.text_to_image(tiny_models, steps=2, width=96, height=80, seed=61)
    # An input that nobody reads and no other test gives, or ComfyUI may have the node in its cache.
    result = client.queue(to_latent(parallel(stock, told="once"))).require_success()
    (shown,) = result.outputs["config"]["parallel_dit"]
    assert shown["text"][:3] == ["uly2", "cpu:0: 1/2 of the attention heads", "cpu:1: 1/2 of the attention heads"]
    assert shown["text"][3].startswith("all 2 CPU ranks are used, as named")
    told = [text for node, text in result.texts if node == "model"]
    assert told and all(text.splitlines()[:-2] == shown["text"] for text in told)
    assert all(text.splitlines()[-2].startswith(("weights: about", "memory: about")) for text in told)
    assert all(text.splitlines()[-1].startswith("uly2 is proven") for text in told)
    assert comfy_server.log.count(LOGGED) == before + 1

    again = parallel(workflows.text_to_image(tiny_models, steps=2, width=96, height=80, seed=62), told="once")
    client.queue(to_latent(again)).require_success()
    assert comfy_server.log.count(LOGGED) == before + 1  # the same MODEL, so nothing was decided again
