"""Stock ComfyUI loads the demo's files, our loader draws the same over two ranks, and the picture shows its prompt."""

import numpy as np
import pytest
import torch
from rounding import ROUNDING

from demo import networks
from demo.evaluation import agreement
from demo.graphs import MODELS, find, parallel_graph, without_exchange, without_our_nodes
from demo.words import Combination, combinations
from host.client import ComfyClient, Workflow
from host.pack_workflows import latent_of, relative_error

pytestmark = pytest.mark.slow
ASKED = combinations()[1][2]  # a red apple on brown, bottom left


def graph_of(asked: Combination, **settings: int) -> Workflow:
    """The demo's graph for a combination over two CPU ranks."""
    return parallel_graph(asked.prompt(), devices="cpu:2", **settings)


def test_two_ranks_draw_what_stock_comfyui_draws(client: ComfyClient) -> None:
    ours = graph_of(ASKED, steps=4)
    stock = latent_of(client, without_our_nodes(ours))
    assert stock.dtype == torch.float32
    assert relative_error(latent_of(client, ours), stock) <= ROUNDING
    assert relative_error(latent_of(client, without_exchange(ours)), stock) > 0.1


def test_the_picture_shows_its_prompt_and_no_other(client: ComfyClient) -> None:
    graph = without_our_nodes(graph_of(ASKED))
    (item,) = client.queue(graph).require_success().images()
    pixels = torch.from_numpy(np.asarray(client.image(item)).copy()).permute(2, 0, 1)[None] / 255
    classifier = networks.load(MODELS / "demo_classifier.safetensors", torch.device("cpu"))
    assert agreement(classifier, pixels, [ASKED]).tolist() == [[True, True, True]]
    others = Combination((ASKED.thing + 1) % 40, (ASKED.colour + 1) % 8, (ASKED.place + 1) % 5)
    assert agreement(classifier, pixels, [others]).tolist() == [[False, False, False]]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a red aple on blue", "does not know the word 'aple'; did you mean apple"),
        ("a red apple on blue, top left " * 2, "has 12 words, the demo's model takes 8"),
    ],
)
def test_words_it_never_learnt_are_named(client: ComfyClient, text: str, said: str) -> None:
    graph = without_our_nodes(graph_of(ASKED))
    graph[find(graph, "CLIPTextEncode")]["inputs"]["text"] = text
    failed = client.queue(graph)
    assert said in failed.error_line("CLIPTextEncode")
