"""Auto in a real server whose CPU ranks are calibrated while it runs: what it chooses then, and what memory it says.

Owns: the calibration that the server finds, made so that an exchange costs as much as a small picture's blocks. Does
not own: which plan a kind of work gets (comfy/test_auto_each_run.py).
"""

from __future__ import annotations

from host.client import Workflow
from host.pack_workflows import TOLERANCE, latent_of, parallel, relative_error, saved_latent, to_latent

from .calibrated import calibrate
from .conftest import Drifted
from .variants import BY_NAME

FLUX = BY_NAME["flux.1 t2i"]


def automatic(devices: str, *, seed: int = 7, **loader: str) -> Workflow:
    """A small picture under auto."""
    graph = to_latent(parallel(small(seed=seed), mode="auto", devices=devices))
    graph["model"]["inputs"] |= loader
    return graph


def small(*, seed: int = 7) -> Workflow:
    """Its stock graph."""
    graph = FLUX.graph(seed=seed, steps=2)
    graph["latent"]["inputs"] |= {"width": 32, "height": 32}
    return graph


def test_ranks_that_nobody_calibrated_share_every_picture_until_somebody_does(drifted: Drifted) -> None:
    client, asked = drifted.client, {"mode": "auto", "devices": "cpu:3", "unet_name": FLUX.file}
    result = client.queue(automatic("cpu:3"))
    assert any("uly3" in text for _, text in result.texts), result.texts
    assert not any("chosen for" in text for _, text in result.texts)
    assert client.get("/parallel_dit/plan", **asked)["plan"] == "uly3"
    before = client.get("/parallel_dit/state")["calibrations"]
    calibrate(drifted.cache, "cpu:3")
    result = client.queue(automatic("cpu:3", seed=8))
    assert any("single, chosen for 4 image tokens, 11 text tokens" in text for _, text in result.texts), result.texts
    assert relative_error(saved_latent(client, result), latent_of(client, small(seed=8))) <= TOLERANCE
    now = client.get("/parallel_dit/plan", **asked)
    assert any("chosen for" in reason for reason in now["reasons"]), now
    assert client.get("/parallel_dit/state")["calibrations"] == before + 1


def test_what_a_step_takes_is_in_the_figure_once_the_file_was_counted_and_before_it_says_that_it_is_not(
    drifted: Drifted,
) -> None:
    client, file = drifted.client, {"unet_name": FLUX.file, "weight_dtype": "bfloat16"}
    calibrate(drifted.cache, "cpu:4")
    by_hand = {"mode": "manual", "devices": "cpu:2", "ulysses": "1", "ring": "2"}
    before = client.get("/parallel_dit/plan", **by_hand, **file)["memory"]
    graph = to_latent(parallel(small(), mode="manual", ring=2, weight_dtype="bfloat16"))
    told = [text.splitlines() for node, text in client.queue(graph).require_success().texts if node == "model"]
    (line,) = {line for lines in told for line in lines if "GB on each device" in line}
    assert line.startswith("weights: about 0.")
    assert line.endswith("; what a step computes is not in this figure")
    client.queue(
        automatic("cpu:4", weight_dtype="bfloat16")
    ).require_success()  # whose files auto counts, as it knows them
    after = client.get("/parallel_dit/plan", **by_hand, **file)["memory"]
    assert (before["weights_alone"], after["weights_alone"]) == (True, False)
    assert after["device"] > before["device"]
