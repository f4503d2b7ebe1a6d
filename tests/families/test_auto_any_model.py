"""Auto in a real server whose CPU ranks are calibrated while it runs: what it chooses then, and what memory it says.

The calibration is made so that an exchange costs as much as a small picture's blocks.
"""

from typing import Any

from rounding import ROUNDING

from host.client import Workflow
from host.pack_workflows import latent_of, parallel, relative_error, saved_latent, to_latent

from .calibrated import calibrate
from .conftest import Drifted
from .variants import BY_NAME

FLUX = BY_NAME["flux.1 t2i"]


def automatic(devices: str, *, seed: int = 7) -> Workflow:
    """A small picture under auto."""
    return to_latent(parallel(small(seed=seed), mode="auto", devices=devices))


def small(*, seed: int = 7) -> Workflow:
    graph = FLUX.graph(seed=seed, steps=2)
    graph["latent"]["inputs"] |= {"width": 32, "height": 32}
    return graph


def memory_of(drifted: Drifted, **file: str) -> dict[str, Any]:
    """What the node shows of a plan by hand."""
    by_hand = {"mode": "manual", "devices": "cpu:2", "ulysses": "1", "ring": "2"}
    found: dict[str, Any] = drifted.client.get("/parallel_dit/plan", **by_hand, **file)["memory"]
    return found


def test_ranks_that_nobody_calibrated_share_every_picture_until_somebody_does(drifted: Drifted) -> None:
    """Auto counts a file once it knows its ranks, and then says what a step takes; before, it says that it does not."""
    client, file = drifted.client, {"unet_name": FLUX.file}
    asked = {"mode": "auto", "devices": "cpu:3", **file}
    result = client.queue(automatic("cpu:3")).require_success()
    assert any("uly3" in text for _, text in result.texts), result.texts
    assert not any("chosen for" in text for _, text in result.texts)
    assert client.get("/parallel_dit/plan", **asked)["plan"] == "uly3"
    uncounted, known = memory_of(drifted, **file), client.get("/parallel_dit/state")["calibrations"]
    told = [text.splitlines() for node, text in result.texts if node == "model"]
    (line,) = {line for lines in told for line in lines if "GB on each device" in line}
    assert line.startswith("weights: about 0.") and line.endswith("; what a step computes is not in this figure")
    calibrate(drifted.cache, "cpu:3")
    result = client.queue(automatic("cpu:3", seed=8))
    assert any("single, chosen for 4 image tokens, 11 text tokens" in text for _, text in result.texts), result.texts
    assert relative_error(saved_latent(client, result), latent_of(client, small(seed=8))) <= ROUNDING
    now = client.get("/parallel_dit/plan", **asked)
    assert any("chosen for" in reason for reason in now["reasons"]), now
    assert client.get("/parallel_dit/state")["calibrations"] == known + 1
    counted = memory_of(drifted, **file)
    assert (uncounted["weights_alone"], counted["weights_alone"]) == (True, False)
    assert counted["device"] > uncounted["device"]
