"""One graph in a real ComfyUI, with the stock loader and with ours: what `make test-quick` knows of servers."""

import re
from pathlib import Path
from signal import SIGINT

from rounding import ROUNDING

from host import forked_ranks, workflows
from host.client import ComfyClient
from host.pack_workflows import latent_of, parallel, relative_error
from host.server import ComfyServer
from host.tiny_models import TinyModels
from host.workers import worker_pids


def test_two_ranks_equal_stock_comfyui_and_another_prompt_does_not(
    client: ComfyClient, tiny_models: TinyModels
) -> None:
    stock = latent_of(client, workflows.text_to_image(tiny_models, steps=3))
    ours = latent_of(client, parallel(workflows.text_to_image(tiny_models, steps=3)))
    other = latent_of(client, parallel(workflows.text_to_image(tiny_models, steps=3, prompt="a lighthouse at dawn")))
    assert relative_error(ours, stock) <= ROUNDING
    assert relative_error(other, stock) > 100 * ROUNDING


def test_a_test_host_and_its_ranks_are_forked(comfy_server: ComfyServer) -> None:
    started = {comfy_server.pid, *worker_pids(comfy_server)}
    assert {pid for pid in started if forked_ranks.is_forked(pid)} == (started if forked_ranks.enabled else set())
    ignored = re.search(r"SigIgn:\s*(\w+)", Path(f"/proc/{comfy_server.pid}/status").read_text())
    assert not int(ignored[1], 16) & 1 << SIGINT - 1, "it would not end by Ctrl-C, where tests run in the background"
