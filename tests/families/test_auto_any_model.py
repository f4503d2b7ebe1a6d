"""Auto for a model of ComfyUI's, in a real server whose two CPU ranks are calibrated: counted, weighed, run by run.

Owns: the calibration that the server finds, made so that an exchange costs as much as a small picture's blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from host.client import ComfyClient, Workflow
from host.pack_workflows import TOLERANCE, latent_of, parallel, relative_error, saved_latent, to_latent
from host.server import ComfyServer

from .calibrated import calibrate
from .variants import BY_NAME, write_families

pytestmark = pytest.mark.slow
WAN = BY_NAME["wan 2.1 t2v"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("calibrated")


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[ComfyClient]:
    calibrate(folder, "cpu:2")
    models = write_families(folder / "models", only=[WAN.name])
    with ComfyServer(models=models, environment={"XDG_CACHE_HOME": str(folder)}) as server:
        yield ComfyClient(server.url)


def automatic(graph: Workflow, devices: str = "cpu:2") -> Workflow:
    return to_latent(parallel(graph, mode="auto", devices=devices))


def of_size(graph: Workflow, width: int, height: int) -> Workflow:
    graph["latent"]["inputs"] |= {"width": width, "height": height}
    return graph


@pytest.mark.parametrize(
    ("width", "cfg", "plan"),
    [(32, 1.0, "single"), (352, 1.0, "ring2"), (32, 3.0, "cfg2-ring1-uly1")],
    ids=["small", "large", "cfg above 1"],
)
def test_each_run_gets_the_plan_of_what_it_samples_and_the_latent_is_stock_comfyuis(
    width: int, cfg: float, plan: str, client: ComfyClient
) -> None:
    graph = of_size(WAN.graph(cfg=cfg, steps=2), width, width)
    result = client.queue(automatic(graph))
    told = [text for node, text in result.texts if node == "sampler" and "step 2/2" in text]
    assert told and told[-1].splitlines()[1].startswith(f"{plan}, chosen for "), result.texts
    frames = (graph["latent"]["inputs"]["length"] - 1) // 4 + 1
    assert f"chosen for {frames * (width // 16) ** 2} image tokens, 13 text tokens" in told[-1]
    assert relative_error(saved_latent(client, result), latent_of(client, graph)) <= TOLERANCE


def test_ranks_that_nobody_calibrated_share_every_picture_until_somebody_does(
    client: ComfyClient, folder: Path
) -> None:
    graph = automatic(of_size(WAN.graph(steps=2), 32, 32), devices="cpu:3")
    asked = {"mode": "auto", "devices": "cpu:3", "unet_name": WAN.file}
    result = client.queue(graph)
    assert any("uly3" in text for _, text in result.texts), result.texts
    assert not any("chosen for" in text for _, text in result.texts)
    assert client.get("/parallel_dit/plan", **asked)["plan"] == "uly3"
    before = client.get("/parallel_dit/state")["calibrations"]
    calibrate(folder, "cpu:3")
    result = client.queue(graph)
    assert any("single, chosen for" in text for _, text in result.texts), result.texts
    now = client.get("/parallel_dit/plan", **asked)
    assert any("chosen for" in reason for reason in now["reasons"]), now
    assert client.get("/parallel_dit/state")["calibrations"] == before + 1


def test_what_a_step_takes_is_in_the_figure_once_the_file_was_counted_and_before_it_says_that_it_is_not(
    client: ComfyClient,
) -> None:
    file = {"unet_name": WAN.file, "weight_dtype": "bfloat16"}
    by_hand = {"mode": "manual", "devices": "cpu:2", "ulysses": "1", "ring": "2"}
    before = client.get("/parallel_dit/plan", **by_hand, **file)["memory"]
    graph = to_latent(parallel(of_size(WAN.graph(steps=1), 32, 32), mode="manual", ring=2, weight_dtype="bfloat16"))
    told = [text.splitlines() for node, text in client.queue(graph).require_success().texts if node == "model"]
    (line,) = {line for lines in told for line in lines if "GB on each device" in line}
    assert line.startswith("weights: about 0.")
    assert line.endswith("; what a step computes is not in this figure")
    weighed = automatic(of_size(WAN.graph(steps=1), 32, 32))  # auto on devices that it knows has the file counted
    weighed["model"]["inputs"]["weight_dtype"] = "bfloat16"
    client.queue(weighed).require_success()
    after = client.get("/parallel_dit/plan", **by_hand, **file)["memory"]
    assert (before["weights_alone"], after["weights_alone"]) == (True, False)
    assert after["device"] > before["device"]
